//! `run` without a prompt: a chat over a real pseudo-terminal.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Place, model};
use crate::terminal::Terminal;

/// Presses Ctrl-C.
pub(crate) fn interrupt(child: &Child) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

/// The end of an answer: an empty line.
const END: &str = "\r\n\r\n";

pub(crate) fn chat(place: &Place, model: &str, flags: &[&str]) -> Terminal {
    Terminal::start(chat_command(place, model, flags))
}

pub(crate) fn chat_command(place: &Place, model: &str, flags: &[&str]) -> Command {
    let flags = [&["run", model, "--temperature", "0", "--ignore-eos"], flags].concat();
    // Every token is an `x`, so that what is an answer and what is not can be told apart.
    place.bodkin(&[&flags[..], &["--logit-bias", "93+1000"]].concat())
}

#[test]
fn a_chat_remembers_until_it_is_cleared() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "4"]);
    chat.expect("/help shows the commands");
    chat.say("/stats", "no answer yet");
    chat.say("Hello there", "xxxx\r\n");
    chat.say("/stats", "prompt ");
    let first: usize = chat.expect(" tokens (0 cached)").parse().unwrap();
    chat.say("Good-bye", "xxxx\r\n");
    chat.say("/stats", "prompt ");
    let second: usize = chat.expect(" tokens (").parse().unwrap();
    let kept: usize = chat.expect(" cached)").parse().unwrap();
    assert!(second > first && kept >= first, "{first} {second} {kept}");
    chat.say("/clear", "");
    chat.say("Hello there", "xxxx\r\n");
    chat.say("/stats", &format!("prompt {first} tokens ("));
    chat.say("/system You are terse.", "");
    chat.say("Hello there", "xxxx\r\n");
    chat.say("/stats", "prompt ");
    let with_system: usize = chat.expect(" tokens (").parse().unwrap();
    assert!(with_system > first);
    // Clearing keeps the system message; an empty one removes it.
    chat.say("/clear", "");
    chat.say("Hello there", END);
    chat.say("/stats", &format!("prompt {with_system} tokens ("));
    chat.say("/system", "");
    chat.say("Hello there", END);
    chat.say("/stats", &format!("prompt {first} tokens ("));
    chat.leave("/exit\r");
    let history = fs::read_to_string(place.path("home/data/bodkin/history")).unwrap();
    assert!(history.contains("Good-bye\n") && history.contains("/system You are terse.\n"));
}

#[test]
fn commands_and_lines() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "2"]);
    for command in [
        "/help, /?",
        "/system TEXT",
        "/clear",
        "/regenerate",
        "/set NAME VALUE",
        "/show",
        "/save FILE",
        "/load FILE",
        "/stats",
        "/exit, /quit, /bye",
    ] {
        chat.say("/help", command);
    }
    chat.say("/help", "\r\n");
    let help = chat.expect("\r\nnext prompts.");
    assert!(help.lines().count() > 10 && help.lines().all(|line| line.len() <= 80), "{help}");
    chat.say("/nonsense", "unknown command /nonsense");
    chat.say("/usr/bin has what?", "xx\r\n");
    chat.say("// comments begin so", "xx\r\n");
    chat.say("", "");
    chat.say("one line\\", "... ");
    chat.press("and another\r");
    chat.expect("xx\r\n");
    chat.say("\"\"\"several", "... ");
    chat.press("lines\"\"\"\r");
    chat.expect("xx\r\n");
    // Ctrl-C drops what was typed, twice says how to leave; Ctrl-D leaves.
    chat.expect(">>> ");
    chat.press("half a line\x03");
    chat.expect(">>> ");
    chat.press("\x03");
    chat.expect("Ctrl-D or /exit leaves the chat");
    chat.leave("\x04");
}

#[test]
fn ctrl_c_stops_an_answer_and_the_chat_goes_on() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["--ctx-size", "100000"]);
    chat.say("Hello", "xxx");
    interrupt(&chat.child);
    chat.expect(END);
    chat.say("/stats", "; answer ");
    chat.leave("/bye\r");
}

#[test]
fn a_model_without_a_template_goes_on_with_texts() {
    let place = Place::new();
    let bare = place.variant("llama", |m| drop(m.remove("tokenizer.chat_template")));
    let mut chat = chat(&place, &bare, &["-n", "3"]);
    chat.expect("no chat template");
    chat.say("Hello", "xxx\r\n");
    chat.say("/system You are terse.", "error: no chat template is in use, so the model takes no");
    chat.say("/set context-shift on", "error: no chat template is in use, so there are no turns");
    chat.say("x ".repeat(2000).trim_end(), "error: the prompt has ");
    chat.leave("/exit\r");
}

#[test]
fn the_history_is_saved_as_it_is_typed() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "3"]);
    chat.say("Hello", "xxx");
    chat.say("/stats", "prompt ");
    chat.expect(">>> ");
    chat.child.kill().unwrap();
    chat.child.wait().unwrap();
    let history = fs::read_to_string(place.path("home/data/bodkin/history")).unwrap();
    assert!(history.ends_with("Hello\n/stats\n"), "{history}");
}

#[test]
fn settings_change_the_next_answer() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "4"]);
    chat.say("Hello", "xxxx\r\n");
    chat.say("/set max-tokens 1", "");
    chat.say("Hello", "x\r\n[answer cut: max-tokens allows 1 token]");
    chat.say("/stats", "answer 1 token, ");
    chat.say("/set max_tokens 2", "");
    chat.say("Hello", "xx\r\n[answer cut: max-tokens allows 2 tokens]");
    // The bias of token 92, which is a `w`.
    chat.say("/set logit-bias=92+2000", "");
    chat.say("/regenerate", "ww\r\n");
    chat.say("/set", "max-tokens           2");
    chat.expect("top-k                40");
    chat.say("/set top_k", "top-k                40");
    for (alias, shown) in [
        ("temp 0.5", "temperature          0.5"),
        ("typical-p 0.9", "typical              0.9"),
        ("n_predict 3", "max-tokens           3"),
        ("n 2", "max-tokens           2"),
        ("r nothing", "stop                 \"nothing\""),
        ("stop \"\"", "stop                 \"\""),
        ("seed random", "seed                 random"),
        ("max-tokens none", "max-tokens           none"),
        ("n 2", "max-tokens           2"),
        ("logit-bias \"\"", "logit-bias           \"\""),
        ("l 5-1.5", "logit-bias           5-1.5"),
        ("l 5-1.5, 6+2", "logit-bias           5-1.5, 6+2"),
        ("stop \"a \", \"b\"", "stop                 \"a \", \"b\""),
        ("stop \"\"", "stop                 \"\""),
        ("temp 0", "temperature          0"),
    ] {
        chat.say(&format!("/set {alias}"), "");
        let name = alias.split(' ').next().unwrap();
        chat.say(&format!("/set {name}"), shown);
    }
    chat.say("/set nonsense 1", "unknown setting nonsense; /set lists the settings");
    chat.say("/set top-k many", "invalid value 'many' for '--top-k <K>'");
    chat.say("/set top-p 7", "error: --top-p: expected a number from 0 to 1, found 7");
    chat.say("/set stop \"a", "error: expected \"A\", \"B\" or a text without quotes, found \"a");
    chat.say("/set repeat-last-n -2", "error: --repeat-last-n: expected -1 or more, found -2");
    chat.say("/show", "llama.gguf (llama ");
    chat.expect(" tokens, 3 turns");
    chat.expect("max-tokens           2");
    chat.leave("/exit\r");
}

#[test]
fn an_answer_does_not_command_the_terminal() {
    let place = Place::new();
    // Token 221 is the escape character, and 207 the carriage return.
    for (bias, shown) in [("221+1000", "\u{fffd}\u{fffd}\u{fffd}\r\n"), ("207+1000", "\r\n")] {
        let args = ["run", &model("llama"), "Hello", "-n", "3", "--quiet", "--logit-bias", bias];
        assert_eq!(Terminal::start(place.bodkin(&args)).rest().0, shown);
    }
    // A pipe gets it as it is.
    let args = ["run", &model("llama"), "Hello", "-n", "3", "--logit-bias", "221+1000"];
    assert_eq!(place.text(&args), "\x1b\x1b\x1b\n");
}

#[test]
fn a_conversation_is_saved_and_loaded() {
    let place = Place::new();
    let mut first = chat(&place, &model("llama"), &["-n", "3", "-s", "You are terse."]);
    first.say("/regenerate", "no answer yet");
    first.say("Hello", "xxx\r\n");
    first.say("/save talk.json", "saved 3 messages");
    first.say("/regenerate", "gives the same again");
    first.expect("xxx\r\n");
    first.say("/show", " tokens, 1 turn\r\n");
    // A file that is no conversation stays.
    first.say("/save home", "error: ");
    fs::write(place.path("notes.txt"), "notes").unwrap();
    first.say(
        "/save notes.txt",
        "error: /save replaces nothing but a saved conversation: notes.txt",
    );
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    first.say("/save pipe", "error: /save replaces nothing but a saved conversation: ");
    first.say("/save talk.json", "saved 3 messages");
    first.say("/save ~/of-home.json", "saved 3 messages");
    first.leave("/exit\r");
    assert_eq!(fs::read_to_string(place.path("notes.txt")).unwrap(), "notes");

    let mut second = chat(&place, &model("llama"), &["-n", "3"]);
    second.say("/load absent.json", "error: cannot read a conversation from absent.json");
    second.say("/load notes.txt", "error: notes.txt: expected a JSON array of messages");
    fs::write(place.path("odd.json"), r#"[{"role": "king", "content": ""}]"#).unwrap();
    second.say("/load pipe", "error: cannot read a conversation from pipe: expected a file");
    second.say("/load home", "error: cannot read a conversation from home: expected a file");
    second.say("/load odd.json", "expected the role system, user, assistant, found `king`");
    second.say("/load talk.json", "loaded 3 messages");
    second.say("/load ~/of-home.json", "loaded 3 messages");
    second.say("/regenerate", "xxx\r\n");
    second.say("And then?", "xxx\r\n");
    second.say("/save talk.json", "saved 5 messages");
    second.leave("/exit\r");
    let saved: serde_json::Value =
        serde_json::from_slice(&fs::read(place.path("talk.json")).unwrap()).unwrap();
    let roles: Vec<&str> =
        saved.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(saved[0]["content"], "You are terse.");
    assert_eq!(saved[2]["content"], "xxx");
}

#[test]
fn a_full_context_says_what_helps() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-c", "100"]);
    chat.say("Hello", "xxx");
    chat.expect("[answer cut: the context of 100 tokens is full; /clear begins a new conversation");
    chat.expect(", /set context-shift on drops the oldest turns, -c N at the next start sets a ");
    chat.say("/show", " 100 of 100 tokens, 1 turn");
    chat.say("Hello", "error: the conversation has ");
    chat.expect(" tokens with this prompt, the context of 100 has room for 99; /clear begins a ");
    chat.say("/clear", "");
    chat.say("x ".repeat(100).trim_end(), "error: the prompt alone has ");
    chat.expect(" tokens, the context of 100 has room for 99; -c N at the next start sets ");
    // The oldest turns are dropped from the next prompt on.
    chat.say("Hello", "xxx");
    chat.say("/set context-shift maybe", "error: context-shift: expected on or off, found `maybe`");
    chat.say("/set context-shift", "context-shift        off");
    chat.say("/set context-shift on", "");
    chat.say("Hello", "[the context of 100 tokens is full: dropped the oldest turn]");
    chat.leave("/exit\r");
}

#[test]
fn a_full_context_drops_the_oldest_turns_if_asked() {
    let place = Place::new();
    let flags = ["-c", "200", "-n", "50", "--context-shift"];
    let mut chat = chat(&place, &model("llama"), &flags);
    for _ in 0..4 {
        chat.say("Hello", "xxx");
        chat.expect("[answer cut: max-tokens allows 50 tokens]");
    }
    chat.say("/show", " of 200 tokens, ");
    let turns = chat.expect(" turn");
    assert!(["1", "2", "3"].contains(&turns.as_str()), "{turns} turns");
    chat.leave("/exit\r");

    // An answer that the context cuts goes on without the oldest turn, and is as long as allowed.
    let command = chat_command(&place, &model("llama"), &["-c", "200", "--context-shift"]);
    let mut chat = Terminal::with_columns(command, 30);
    chat.say("/set max-tokens 100", "");
    chat.say("Hello", "[answer cut: max-tokens allows\r\n100 tokens]");
    chat.say("/set max-tokens 120", "");
    chat.say("Hello", "Hello");
    let note = "\r\n[the context of 200 tokens is\r\nfull: dropped the oldest turn]";
    let start = chat.expect(note);
    let end = chat.expect("\r\n[answer cut: max-tokens allows\r\n120 tokens]");
    let count = |text: &str| text.matches('x').count();
    assert!(count(&start) > 10 && count(&end) > 10, "{start}{end}");
    assert_eq!(count(&start) + count(&end), 120);
    chat.leave("/exit\r");
}

#[test]
fn a_note_in_an_answer_breaks_no_words() {
    let place = Place::new();
    // The tokens `the` and `and` again and again, with spaces before them.
    let flags = ["--logit-bias", "267+3000", "--logit-bias", "294+2000"];
    let penalty = ["--presence-penalty", "5000", "--repeat-last-n", "1"];
    let length = ["-c", "200", "-n", "120", "--context-shift", "--ignore-eos"];
    let args = [&["run", &model("llama"), "--temperature", "0"], &flags[..], &penalty, &length];
    let mut chat = Terminal::with_columns(place.bodkin(&args.concat()), 30);
    chat.say("Hello", "[answer cut: ");
    chat.say("Hello", "Hello");
    let shown = chat.expect("\r\n[answer cut: ");
    let answer = shown.rsplit("\x1b[?2004h").next().unwrap();
    let lines: Vec<&str> = answer.trim_start().lines().collect();
    let note = ["[the context of 200 tokens is", "full: dropped the oldest turn]"];
    let at = lines.windows(2).position(|lines| lines == note).unwrap();
    let is_word = |word: &str| word == "the" || word == "and";
    for line in lines[..at].iter().chain(&lines[at + 2..]) {
        assert!(line.len() <= 30 && line.split(' ').all(is_word), "{answer}");
    }
    chat.leave("/exit\r");
}

#[test]
fn words_are_not_broken_at_the_edge() {
    let place = Place::new();
    let model = model("llama");
    // The tokens ` the`, ` and`, ` was`, again and again.
    let flags = [
        "-n",
        "30",
        "--logit-bias",
        "267+3000",
        "--logit-bias",
        "294+2000",
        "--logit-bias",
        "322+1000",
        "--presence-penalty",
        "5000",
        "--repeat-last-n",
        "2",
    ];
    let args = [&["run", &model, "Hello", "--temperature", "0"], &flags[..]].concat();
    let text = ["the", "and", "was"].repeat(10).join(" ");
    assert_eq!(place.text(&args).trim(), text, "no terminal, no breaks");
    let (shown, _) = Terminal::with_columns(place.bodkin(&args), 14).rest();
    let shown: Vec<&str> = shown.split("\r\n").take_while(|line| !line.starts_with('[')).collect();
    assert!(shown.iter().all(|line| line.len() <= 14), "{shown:?}");
    assert_eq!(shown.join(" ").trim(), text);
}

#[test]
fn messages_break_between_words_in_a_narrow_window() {
    let place = Place::new();
    let shown = |columns| {
        let flags = ["run", &model("llama"), "-c", "64", "--temperature", "0"];
        let mut chat = Terminal::with_columns(place.bodkin(&flags), columns);
        chat.say("/help", "/help, /?");
        let help = chat.expect(">>> ");
        chat.press("Hello\r");
        chat.expect("[answer cut: ");
        let mark = chat.expect("]");
        chat.leave("/exit\r");
        [help, format!("[answer cut: {mark}")]
    };
    for (narrow, wide) in shown(40).into_iter().zip(shown(200)) {
        let lines: Vec<&str> = narrow.split("\r\n").collect();
        let of_text = lines.len() - usize::from(narrow.contains('\x1b'));
        assert!(lines[..of_text].iter().all(|line| line.len() <= 40), "{narrow}");
        let words =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        assert_eq!(words(&narrow), words(&wide));
    }
}

#[test]
fn standard_input_that_does_not_end_is_named() {
    let place = Place::new();
    let mut command = place.bodkin(&["run", &model("llama"), "Hello", "-n", "1"]);
    command.stdin(Stdio::piped());
    let mut terminal = Terminal::of_stderr(command);
    terminal.expect("reading standard input until its end\r\n");
    drop(terminal.child.stdin.take());
    assert!(terminal.child.wait().unwrap().success());
}

#[test]
fn a_long_prompt_shows_progress() {
    let place = Place::new();
    fs::write(place.path("long.txt"), "x ".repeat(40_000)).unwrap();
    let flags = ["-f", "long.txt", "--raw", "-c", "100000", "--batch-size", "1"];
    let command = place.bodkin(&[&["run", &model("llama")], &flags[..]].concat());
    let mut terminal = Terminal::of_stderr(command);
    terminal.expect("reading the prompt [");
    terminal.expect(" tokens, ");
    terminal.expect(" left");
    interrupt(&terminal.child);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(130));
}

/// The step that reads the prompt takes many seconds, and Ctrl-C does not wait for its end.
#[test]
fn ctrl_c_ends_the_reading_of_a_prompt_at_once() {
    let place = Place::new();
    fs::write(place.path("long.txt"), "x ".repeat(30_000)).unwrap();
    let flags = ["-f", "long.txt", "--raw", "-c", "65536", "--batch-size", "65536", "-t", "1"];
    for json in [&[][..], &["--json"]] {
        let model = model("llama");
        let args = [&["run", &model], &flags[..], json].concat();
        let mut command = place.bodkin(&args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The note about the context comes before the model is loaded.
        child.stderr.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let start = Instant::now();
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert_eq!(output.status.code(), Some(130));
        let text = String::from_utf8(output.stdout).unwrap();
        if json.is_empty() {
            assert_eq!(text, "\n");
            continue;
        }
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&answer["text"], &answer["reason"]), (&"".into(), &"interrupted".into()));
        assert_eq!(answer["generated_tokens"], 0);
    }
}

/// The input line comes back while the engine is still in the step of the prompt. The next prompt
/// is answered behind it, and leaving waits for nothing.
#[test]
fn ctrl_c_during_a_prompt_gives_the_input_line_back() {
    let place = Place::new();
    for (file, text) in [("long.json", "x "), ("other.json", "y ")] {
        let messages = serde_json::json!([
            { "role": "user", "content": text.repeat(12_000) },
            { "role": "assistant", "content": "x" },
        ]);
        fs::write(place.path(file), messages.to_string()).unwrap();
    }
    let flags = ["-n", "3", "-c", "65536", "--batch-size", "65536", "-t", "1"];
    let mut chat = chat(&place, &model("llama"), &flags);
    chat.say("/load long.json", "");
    chat.say("Hello", "reading the prompt");
    let start = Instant::now();
    interrupt(&chat.child);
    chat.say("/clear", "");
    let returned = start.elapsed();
    chat.say("Hello", "xxx");
    assert!(3 * returned < start.elapsed(), "{returned:?} of {:?}", start.elapsed());
    // The prompt that was interrupted is not part of the conversation.
    chat.say("/stats", "prompt ");
    let tokens: usize = chat.expect(" tokens").parse().unwrap();
    assert!(tokens < 100, "{tokens}");
    chat.say("/load other.json", "");
    chat.say("Hello", "reading the prompt");
    let start = Instant::now();
    interrupt(&chat.child);
    chat.leave("/exit\r");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn json_needs_a_prompt() {
    let place = Place::new();
    let mut terminal = Terminal::start(place.bodkin(&["run", &model("llama"), "--json"]));
    terminal.expect("error: --json needs a prompt");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(2));
}

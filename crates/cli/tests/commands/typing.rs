//! Keys that are pressed while an answer appears, over a real pseudo-terminal.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use crate::chat::{chat, chat_command, interrupt};
use crate::place::{Place, model};
use crate::terminal::Terminal;

/// The modes of a terminal that decide what happens to keys.
fn local_modes(terminal: &Terminal) -> LocalModes {
    tcgetattr(&terminal.keyboard).unwrap().local_modes
}

fn has_echo(terminal: &Terminal) -> bool {
    local_modes(terminal).contains(LocalModes::ECHO)
}

#[test]
fn lines_typed_during_an_answer_are_the_next_prompts() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "900"]);
    chat.say("Hello", "xxx");
    chat.press("/set max-tokens 3\rAnd then?\r/sta");
    let answer = chat.expect("[answer cut: max-tokens allows 900 tokens]");
    assert!(answer.chars().all(|c| "x\r\n".contains(c)), "typed text is shown in {answer}");
    chat.expect("/set max-tokens 3");
    chat.expect("And then?");
    chat.expect("xxx\r\n[answer cut: max-tokens allows 3 tokens]");
    chat.press("ts\r");
    chat.expect("answer 3 tokens");
    chat.leave("/exit\r");
}

/// A shell that stops and continues a chat, by Ctrl-Z and `fg`, sets its own modes meanwhile.
#[test]
fn a_terminal_that_a_shell_has_set_is_quiet_again() {
    let place = Place::new();
    let flags = ["--ctx-size", "20000", "-n", "19000"];
    let bodkin = chat_command(&place, &model("llama"), &flags);
    // Only a process in the foreground of its session's terminal sets the modes of that.
    let mut command = Command::new("setsid");
    command.arg("--ctty").arg(bodkin.get_program()).args(bodkin.get_args());
    command.envs(bodkin.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(bodkin.get_current_dir().unwrap());
    let mut chat = Terminal::start(command);
    chat.say("Hello", "xxx");
    let quiet = local_modes(&chat);
    for of_shell in [LocalModes::ECHO | LocalModes::ICANON, LocalModes::ICANON] {
        let mut modes = tcgetattr(&chat.keyboard).unwrap();
        modes.local_modes |= of_shell;
        tcsetattr(&chat.keyboard, OptionalActions::Now, &modes).unwrap();
        let start = Instant::now();
        while local_modes(&chat) != quiet {
            assert!(start.elapsed() < Duration::from_secs(30), "{:?}", local_modes(&chat));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(!has_echo(&chat) && quiet.contains(LocalModes::ISIG), "the answer goes on");
    interrupt(&chat.child);
    chat.leave("\x04");
}

/// An interactive shell, and the words of a chat for it. None where there is no bash.
fn shell(place: &Place) -> Option<(Terminal, String)> {
    if !Command::new("bash").args(["-c", "true"]).status().is_ok_and(|status| status.success()) {
        return None;
    }
    let bodkin = chat_command(place, &model("llama"), &["-c", "20000", "-n", "19000"]);
    let words = [bodkin.get_program()].into_iter().chain(bodkin.get_args());
    let words: Vec<&str> = words.map(|word| word.to_str().unwrap()).collect();
    // Lines are edited by the system, which shows them as they are typed.
    let mut command = Command::new("setsid");
    command.args(["--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]);
    command.envs(bodkin.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("PS1", "shell> ").current_dir(place.path(""));
    let mut shell = Terminal::start(command);
    shell.expect("shell> ");
    Some((shell, words.join(" ")))
}

/// Presses Ctrl-Z in an answer, behind a command. The shell finds the modes of before.
fn suspend(place: &Place, shell: &mut Terminal, chat: &str) {
    let modes = local_modes(shell);
    shell.press(&format!("{chat}\r"));
    shell.say("Hello", "xxx");
    shell.press("touch typed\rtouch ty\x1a");
    let answer = shell.expect("Stopped");
    assert!(!answer.contains("typed"), "{answer}");
    shell.expect("shell> ");
    assert_eq!(local_modes(shell), modes);
    shell.press("stty -a; echo $((1 + 1))nd\r");
    let after = shell.expect("\r\n2nd\r\n");
    assert!(!after.contains("touch"), "{after}");
    assert!(!place.path("typed").exists());
}

/// The shell gets none of what was typed before Ctrl-Z.
#[test]
fn ctrl_z_leaves_the_shell_nothing_to_read() {
    let place = Place::new();
    let Some((mut shell, chat)) = shell(&place) else { return };
    suspend(&place, &mut shell, &chat);
    shell.press("fg\r");
    shell.expect("xxx");
    // At the prompt Ctrl-Z stops at once.
    shell.press("\x03");
    shell.expect(">>> ");
    shell.press("\x1a");
    shell.expect("Stopped");
    // Once: the next answer does not stop for it again.
    shell.press("fg\r");
    shell.say("/set max-tokens 3", "max-tokens");
    shell.say("Hello", "[answer cut");
    shell.say("/exit", "shell> ");
    shell.press("exit\r");
    assert!(shell.child.wait().unwrap().success());
}

/// The shell waits for the script, so the system stops the chat.
#[test]
fn ctrl_z_behind_a_script_leaves_the_shell_nothing_to_read() {
    let place = Place::new();
    let Some((mut shell, chat)) = shell(&place) else { return };
    fs::write(place.path("script"), format!("{chat}\nexit $?\n")).unwrap();
    suspend(&place, &mut shell, "sh script");
    shell.press("kill -9 %1; kill -9 $$\r");
    shell.child.wait().unwrap();
}

#[test]
fn what_is_pasted_during_an_answer_is_the_next_prompt() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["--ctx-size", "20000", "-n", "2000"]);
    chat.say("Hello", "xxx");
    // Longer than a line that the system would edit, and two lines.
    let line = "word ".repeat(1200);
    chat.press(&format!("\x1b[200~{line}first end\rsecond end\x1b[201~\r"));
    let answer = chat.expect("[answer cut: max-tokens allows 2000 tokens]");
    assert!(answer.chars().all(|c| "x\r\n".contains(c)), "pasted text is shown in {answer}");
    chat.expect("second end");
    chat.expect("[answer cut: max-tokens allows 2000 tokens]");
    chat.leave("\x04");
    let history = fs::read_to_string(place.path("home/data/bodkin/history")).unwrap();
    assert!(history.contains(&format!("{line}first end\\nsecond end\n")), "{history}");
}

/// The answer of `run` with a prompt, after which a shell reads what was typed.
#[test]
fn a_single_answer_hides_keys_and_restores_the_terminal() {
    let place = Place::new();
    let long = ["Hello", "-c", "20000", "-n", "900"];
    for stops in [false, true] {
        let mut run = Terminal::start(chat_command(&place, &model("llama"), &long));
        let modes = local_modes(&run);
        run.expect("xxx");
        assert!(!has_echo(&run) && local_modes(&run).contains(LocalModes::ICANON));
        run.press("ls\r");
        if stops {
            interrupt(&run.child);
        }
        let keyboard = run.keyboard.try_clone().unwrap();
        let (shown, mut child) = run.rest();
        let answer = shown.split("\r\n").next().unwrap();
        assert!(answer.chars().all(|c| c == 'x'), "typed text is shown in {answer}");
        assert_eq!(tcgetattr(keyboard).unwrap().local_modes, modes);
        assert_eq!(child.wait().unwrap().code(), Some(if stops { 130 } else { 0 }));
    }
    // The first call of the model is the prompt with the first token.
    let flags = ["Hello", "--device", "mock:error@9", "--raw"];
    let mut run = Terminal::start(chat_command(&place, &model("llama"), &flags));
    run.expect("error: the mock fails");
    assert!(!run.child.wait().unwrap().success());
    assert!(has_echo(&run));
}

//! Several requests at once on tiny models, one with windows and one with recurrent state: each
//! gets what it gets alone, a cancelled one ends, and requests that do not fit say so without harm
//! to the others.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bodkin_backend::Limits;
use bodkin_engine::{
    Engine, Error, Event, Events, FinishReason, PrefixStore, Request, SamplerOptions,
};
use bodkin_gguf::File;

mod tiny;

/// An engine on a tiny Gemma 3, whose local layers have a window.
fn engine(change: impl FnOnce(&mut Limits)) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models/gemma3.gguf");
    tiny::open(File::open(path).unwrap(), change)
}

/// Prompts and answers of a tiny Mixtral choose experts; pages come back where nothing keeps them.
#[test]
fn an_engine_tells_its_state() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models/mixtral.gguf");
    let engine = tiny::open(File::open(path).unwrap(), |_| ());
    let counts = || -> Vec<(usize, u64)> {
        let layers = engine.expert_stats().unwrap().layers.into_iter();
        layers.map(|layer| (layer.layer, layer.counts.iter().sum())).collect()
    };
    let before = engine.stats();
    assert_eq!((before.running, before.waiting, before.requests), (0, 0, 0));
    assert_eq!(before.free_pages, before.total_pages);
    assert_eq!(counts(), [(0, 0), (1, 0)]);
    let (tokens, end) = run(&engine, request(7, 40, 10));
    assert_eq!((tokens.len(), end.unwrap()), (10, FinishReason::Length));
    let after = engine.stats();
    assert_eq!((after.running, after.waiting, after.requests), (0, 0, 1));
    // The last token is sampled and not run: 49 tokens are stored, in two pages.
    assert_eq!((after.prompt_tokens, after.generated_tokens, after.rows), (40, 10, 49));
    assert_eq!((after.free_pages[0], after.cached_pages[0]), (before.free_pages[0] - 2, 2));
    assert_eq!(counts(), [(0, 2 * 49), (1, 2 * 49)]);
    // More than run at once.
    let long: Vec<Events> =
        (2..7).map(|seed| engine.submit(request(seed, 20, 70)).unwrap()).collect();
    assert!(engine.stats().running <= tiny::OPTIONS.parallel);
    // Two more wait than the queue takes.
    let more: Vec<Result<Events, Error>> =
        (0..8).map(|seed| engine.submit(request(seed, 20, 70))).collect();
    let refused = more.iter().filter_map(|events| events.as_ref().err()).map(Error::to_string);
    assert_eq!(refused.collect::<Vec<_>>(), ["the queue is full: 8 requests wait already"; 2]);
    drop((long, more));
}

/// An engine on a tiny Nemotron-H: blocks with recurrent state, and one with attention.
fn hybrid(change: impl FnOnce(&mut Limits)) -> Engine {
    tiny::open(hybrid_file(), change)
}

/// Of this model only the header is kept; its weights are made up here.
fn hybrid_file() -> File {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/headers");
    let mut bytes = std::fs::read(folder.join("nemotron-h.gguf")).unwrap();
    bytes.resize(bytes.len() + 1_000_000, 0);
    let header = File::from_bytes("hybrid.gguf", bytes.clone()).unwrap();
    let mut random = 1u32;
    for tensor in header.tensors() {
        let (centre, spread) = match tensor.name.as_str() {
            name if name.ends_with("norm.weight") => (1.0, 0.2),
            name if name.ends_with("ssm_a") => (-0.6, 0.5),
            _ => (0.0, 2.0 / (tensor.cols() as f32).sqrt()),
        };
        let data = &mut bytes[tensor.offset as usize..][..tensor.bytes as usize];
        for value in data.chunks_exact_mut(4) {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let unit = (random >> 8) as f32 / (1 << 23) as f32 - 1.0;
            value.copy_from_slice(&(centre + spread * unit).to_le_bytes());
        }
    }
    File::from_bytes("hybrid.gguf", bytes).unwrap()
}

fn request(seed: u32, length: u32, max_tokens: usize) -> Request {
    Request {
        prompt: (0..length).map(|i| 5 + (i * seed) % 300).collect(),
        sampling: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..Request::default()
    }
}

/// The tokens of a request and how it ended.
fn collect(events: Events) -> (Vec<u32>, Result<FinishReason, Error>) {
    let (tokens, end) = collect_all(events);
    (tokens, end.map(|(reason, _)| reason))
}

/// As [`open`], with pages on disk.
fn open_stored(file: File, folder: &Path) -> Engine {
    open_stored_with(file, folder, |_| ())
}

fn open_stored_with(file: File, folder: &Path, change: impl FnOnce(&mut Limits)) -> Engine {
    let store = PrefixStore::open(folder, "model", 1 << 30).unwrap();
    let (model, tokenizer) = tiny::load(file, change);
    Engine::open_with(model, tokenizer, tiny::OPTIONS, Some(store)).unwrap()
}

/// Runs a request to its end.
fn run(engine: &Engine, request: Request) -> (Vec<u32>, Result<FinishReason, Error>) {
    match engine.submit(request) {
        Ok(events) => collect(events),
        Err(error) => (Vec::new(), Err(error)),
    }
}

/// As [`collect`], with how many tokens of the prompt were stored already.
fn collect_all(events: Events) -> (Vec<u32>, Result<(FinishReason, usize), Error>) {
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Prefill { done, total } => assert!(tokens.is_empty() && done < total),
            Event::PromptToken { .. } => assert!(tokens.is_empty()),
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { reason, usage, .. } => {
                assert_eq!(usage.generated_tokens, tokens.len());
                return (tokens, Ok((reason, usage.cached_tokens)));
            }
            Event::Error(error) => return (tokens, Err(error)),
        }
    }
    panic!("a request ends with an event");
}

#[test]
fn neighbours_change_nothing() {
    check_neighbours(|| engine(|_| ()));
}

#[test]
fn neighbours_change_nothing_in_recurrent_state() {
    check_neighbours(|| hybrid(|_| ()));
    // State slots for one request and its checkpoint: the others wait for it.
    check_neighbours(|| hybrid(|limits| limits.state_slots = 2));
    check_neighbours(|| hybrid(|limits| limits.state_slots = 1));
}

fn check_neighbours(engine: impl Fn() -> Engine) {
    let requests = [request(7, 40, 20), request(11, 3, 30), request(13, 25, 9), request(17, 50, 5)];
    let alone: Vec<Vec<u32>> = requests
        .iter()
        .map(|r| run(&engine(), r.clone()))
        .map(|(tokens, end)| {
            assert_eq!(end.unwrap(), FinishReason::Length);
            tokens
        })
        .collect();
    let engine = engine();
    // More than run at once, twice, so that the second round finds kept sequences.
    for _ in 0..2 {
        let events: Vec<Events> =
            requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let together: Vec<Vec<u32>> = events.into_iter().map(|e| collect(e).0).collect();
        assert_eq!(together, alone);
    }
}

#[test]
fn a_cancelled_request_ends_and_the_others_go_on() {
    let engine = engine(|_| ());
    let long = engine.submit(request(7, 20, 70)).unwrap();
    let short = engine.submit(request(11, 20, 10)).unwrap();
    let canceller = long.canceller();
    canceller.cancel();
    let (tokens, end) = collect(long);
    assert_eq!(end.unwrap(), FinishReason::Cancelled);
    assert!(tokens.len() < 70);
    let (tokens, end) = collect(short);
    assert_eq!((tokens.len(), end.unwrap()), (10, FinishReason::Length));
    drop(engine.submit(request(7, 20, 70)).unwrap());
    let (tokens, _) = run(&engine, request(11, 20, 10));
    assert_eq!(tokens.len(), 10);
}

/// A tiny Gemma 3 whose last norm, and so every logit, is NaN.
#[test]
fn nan_logits_end_a_request_with_an_error() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let mut bytes = std::fs::read(folder.join("gemma3.gguf")).unwrap();
    let file = File::from_bytes("nan.gguf", bytes.clone()).unwrap();
    let norm = file.tensors().iter().find(|t| t.name == "output_norm.weight").unwrap();
    bytes[norm.offset as usize..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let engine = tiny::open(File::from_bytes("nan.gguf", bytes).unwrap(), |_| ());
    // The model samples the first two, the engine's own sampler the third.
    let greedy = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
    let typical = SamplerOptions { typical_p: 0.9, ..SamplerOptions::default() };
    for sampling in [greedy, SamplerOptions::default(), typical] {
        let (tokens, end) = run(&engine, Request { sampling, ..request(7, 40, 10) });
        let error = end.unwrap_err().to_string();
        let place = "first appears in the head, the input of token_embd.weight";
        assert!(tokens.is_empty() && error.ends_with(place), "{error}");
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert_eq!(stats.free_pages, stats.total_pages, "nobody may reuse what was computed");
}

#[test]
fn what_does_not_fit_says_so() {
    let engine = engine(|_| ());
    let error = run(&engine, request(7, 96, 1)).1.unwrap_err();
    assert_eq!(error.to_string(), "the prompt has 96 tokens, the context has room for 95");
    let error = run(&engine, Request::default()).1.unwrap_err();
    assert_eq!(error.to_string(), "the prompt has no tokens");
    let wrong = Request { prompt: vec![5, 40_000], ..request(7, 1, 1) };
    let error = run(&engine, wrong).1.unwrap_err();
    assert_eq!(error.to_string(), "token id 40000: the model has 400 tokens");
    assert_eq!(run(&engine, request(7, 90, 50)).0.len(), 6, "to the end of the context");
}

#[test]
fn short_pages_delay_requests_and_end_none() {
    // Room for one request of this length at a time, and a little more.
    let engine = engine(|limits| limits.pages.iter_mut().for_each(|pages| *pages = 4));
    let events: Vec<Events> =
        (2..6).map(|seed| engine.submit(request(seed, 40, 30)).unwrap()).collect();
    for events in events {
        let (tokens, end) = collect(events);
        assert_eq!((tokens.len(), end.unwrap()), (30, FinishReason::Length));
    }
}

/// There are pages for one request at a time: the others are preempted, give up their pages and
/// state slots, and begin again.
#[test]
fn recurrent_state_is_computed_again_where_pages_were_short() {
    let alone = |seed| run(&hybrid(|_| ()), request(seed, 40, 30)).0;
    let engine = hybrid(|limits| limits.pages[0] = 4);
    let events: Vec<Events> =
        (2..6).map(|seed| engine.submit(request(seed, 40, 30)).unwrap()).collect();
    for (events, seed) in events.into_iter().zip(2..) {
        let (tokens, end) = collect(events);
        assert_eq!((tokens, end.unwrap()), (alone(seed), FinishReason::Length));
    }
}

/// The next turn of a chat goes on from the end of the last, or from the last full page of its
/// prompt where it repeats the answer in other tokens; the result is that of computing everything.
#[test]
fn recurrent_state_goes_on_where_a_sequence_or_its_prompt_ended() {
    let first = request(7, 40, 12);
    let then = |answer: &[u32]| Request {
        prompt: first.prompt.iter().chain(answer).copied().chain(50..60).collect(),
        ..first.clone()
    };
    let (answer, _) = run(&hybrid(|_| ()), first.clone());
    assert!(answer.iter().any(|id| *id != answer[0]), "the text says something about the state");
    // The last token of an answer was drawn and not stored.
    for (repeated, stored) in [(answer.clone(), 51), (vec![60; 12], 32), (vec![], 32)] {
        let next = then(&repeated);
        let alone = run(&hybrid(|_| ()), next.clone()).0;
        let engine = hybrid(|_| ());
        let (again, _) = run(&engine, first.clone());
        assert_eq!(again, answer);
        let (tokens, end) = collect_all(engine.submit(next.clone()).unwrap());
        assert_eq!((tokens, end.unwrap()), (alone, (FinishReason::Length, stored)));
    }
    // State never goes back into what it has passed.
    let engine = hybrid(|_| ());
    run(&engine, first.clone()).1.unwrap();
    let shorter = Request { prompt: first.prompt[..32].to_vec(), ..first.clone() };
    assert_eq!(collect_all(engine.submit(shorter).unwrap()).1.unwrap(), (FinishReason::Length, 0));
}

/// A prompt of 40 tokens takes three steps of 16, and the context ends an answer by that name.
#[test]
fn prefill_is_reported_and_the_context_is_named() {
    let engine = engine(|_| ());
    let prefill = |events: Events| -> Vec<(usize, usize)> {
        let done = events.filter_map(|event| match event {
            Event::Prefill { done, total } => Some((done, total)),
            _ => None,
        });
        done.collect()
    };
    assert_eq!(prefill(engine.submit(request(7, 40, 3)).unwrap()), [(0, 40), (16, 40), (32, 40)]);
    assert_eq!(prefill(engine.submit(request(11, 3, 3)).unwrap()), [(0, 3)]);
    // The pages of an earlier prompt count as read.
    assert_eq!(prefill(engine.submit(request(7, 40, 3)).unwrap()), [(32, 40)]);
    let (tokens, end) = run(&engine, request(7, 40, 1000));
    assert_eq!((tokens.len(), end.unwrap()), (tiny::OPTIONS.context - 40, FinishReason::Context));
}

/// Waits until `count` pages are written, and returns their paths.
fn wait_for_pages(folder: &Path, count: usize) -> Vec<PathBuf> {
    let start = Instant::now();
    loop {
        let files = std::fs::read_dir(folder.join("model")).unwrap();
        let paths = files.map(|entry| entry.unwrap().path());
        let is_page = |path: &PathBuf| path.extension().is_some_and(|end| end == "page");
        let pages: Vec<PathBuf> = paths.filter(is_page).collect();
        if pages.len() >= count {
            return pages;
        }
        assert!(start.elapsed().as_secs() < 10, "{count} full pages are written");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A prompt is not computed again after a restart: with windows, and with recurrent state, which
/// goes on from a checkpoint.
#[test]
fn prompts_are_found_on_disk_after_a_restart() {
    let gemma = || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
        File::open(folder.join("gemma3.gguf")).unwrap()
    };
    let files: [&dyn Fn() -> File; 2] = [&gemma, &hybrid_file];
    for file in files {
        let folder = tempfile::tempdir().unwrap();
        let first = request(7, 70, 5);
        let (wanted, _) = run(&open_stored(file(), folder.path()), first.clone());
        wait_for_pages(folder.path(), 2);
        let engine = open_stored(file(), folder.path());
        let (tokens, end) = collect_all(engine.submit(first).unwrap());
        assert_eq!((tokens, end.unwrap()), (wanted, (FinishReason::Length, 64)));
    }
}

/// The pages of a folder as pipes, which are read when something is written to them, with what
/// they were.
#[cfg(target_os = "linux")]
fn pipes(folder: &Path, count: usize) -> Vec<(PathBuf, Vec<u8>)> {
    let as_pipe = |page: PathBuf| {
        let content = std::fs::read(&page).unwrap();
        std::fs::remove_file(&page).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&page).status().unwrap().success());
        (page, content)
    };
    wait_for_pages(folder, count).into_iter().map(as_pipe).collect()
}

/// Writes to the one pipe that is read now, and returns the others.
#[cfg(target_os = "linux")]
fn write_to_one(
    mut pipes: Vec<(PathBuf, Vec<u8>)>,
    content: impl FnOnce(Vec<u8>) -> Vec<u8>,
) -> Vec<(PathBuf, Vec<u8>)> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    // O_NONBLOCK: opening a pipe without a reader fails.
    let open =
        |path: &Path| std::fs::OpenOptions::new().write(true).custom_flags(0o4000).open(path);
    let start = Instant::now();
    loop {
        for i in 0..pipes.len() {
            if let Ok(mut pipe) = open(&pipes[i].0) {
                pipe.write_all(&content(pipes.swap_remove(i).1)).unwrap();
                return pipes;
            }
        }
        assert!(start.elapsed().as_secs() < 10, "a page is read");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A disk that does not answer holds up the request whose pages it has, and no other one.
#[cfg(target_os = "linux")]
#[test]
fn nobody_waits_for_the_disk_of_another_request() {
    let folder = tempfile::tempdir().unwrap();
    let (first, other) = (request(7, 70, 5), request(11, 20, 10));
    let (wanted, _) = run(&open_stored(hybrid_file(), folder.path()), first.clone());
    let pipes = pipes(folder.path(), 2);
    let engine = open_stored(hybrid_file(), folder.path());
    let (waits, is_cancelled) = (engine.submit(first.clone()), engine.submit(first));
    let is_cancelled = is_cancelled.unwrap();
    assert_eq!(run(&engine, other).1.unwrap(), FinishReason::Length);
    assert_eq!((engine.stats().running, engine.stats().waiting), (0, 2));
    is_cancelled.canceller().cancel();
    assert_eq!(collect(is_cancelled).1.unwrap(), FinishReason::Cancelled);
    // What comes is no page, so the prompt is computed.
    write_to_one(pipes, |_| b"no page".to_vec());
    let (tokens, end) = collect_all(waits.unwrap());
    assert_eq!((tokens, end.unwrap()), (wanted, (FinishReason::Length, 0)));
}

/// A request that runs takes the memory of pages that are read for another one, which computes
/// them later.
#[cfg(target_os = "linux")]
#[test]
fn restored_pages_give_way_to_a_running_request() {
    let folder = tempfile::tempdir().unwrap();
    let first = request(7, 70, 5);
    let (wanted, _) = run(&open_stored(hybrid_file(), folder.path()), first.clone());
    let mut pipes = pipes(folder.path(), 2);
    let engine = open_stored_with(hybrid_file(), folder.path(), |limits| limits.pages[0] = 3);
    let waits = engine.submit(first).unwrap();
    pipes = write_to_one(pipes, |page| page);
    let start = Instant::now();
    while engine.stats().free_pages != [2] {
        assert!(start.elapsed().as_secs() < 10, "the first page is restored");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (tokens, end) = run(&engine, request(13, 70, 20));
    assert_eq!((tokens.len(), end.unwrap()), (20, FinishReason::Length));
    write_to_one(pipes, |page| page);
    let (tokens, end) = collect(waits);
    assert_eq!((tokens, end.unwrap()), (wanted, FinishReason::Length));
}

/// Pages that are read for another request go before a running one is preempted.
#[cfg(target_os = "linux")]
#[test]
fn restored_pages_go_before_a_running_request_does() {
    let folder = tempfile::tempdir().unwrap();
    let first = request(7, 70, 5);
    run(&open_stored(hybrid_file(), folder.path()), first.clone()).1.unwrap();
    let mut pipes = pipes(folder.path(), 2);
    let engine = open_stored_with(hybrid_file(), folder.path(), |limits| limits.pages[0] = 6);
    let waits = engine.submit(first).unwrap();
    pipes = write_to_one(pipes, |page| page);
    let start = Instant::now();
    while engine.stats().free_pages != [5] {
        assert!(start.elapsed().as_secs() < 10, "the first page is restored");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Each grows to three pages.
    let others = [11, 13].map(|seed| engine.submit(request(seed, 40, 40)).unwrap());
    for other in others {
        assert_eq!(collect(other).1.unwrap(), FinishReason::Length);
    }
    assert_eq!(engine.stats().preemptions, 0);
    write_to_one(pipes, |page| page);
    assert_eq!(collect(waits).1.unwrap(), FinishReason::Length);
}

/// A request that is cancelled while the disk does not answer gives back what it has.
#[cfg(target_os = "linux")]
#[test]
fn a_cancelled_request_frees_its_restored_pages() {
    let folder = tempfile::tempdir().unwrap();
    let first = request(7, 70, 5);
    run(&open_stored(hybrid_file(), folder.path()), first.clone()).1.unwrap();
    let pipes = pipes(folder.path(), 2);
    let engine = open_stored_with(hybrid_file(), folder.path(), |limits| limits.pages[0] = 3);
    let waits = engine.submit(first).unwrap();
    write_to_one(pipes, |page| page);
    let wait_for = |free: usize, cached: usize| {
        let (start, wanted) = (Instant::now(), (vec![free], vec![cached]));
        while (engine.stats().free_pages, engine.stats().cached_pages) != wanted {
            assert!(start.elapsed().as_secs() < 10, "{wanted:?}: {:?}", engine.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait_for(2, 0);
    waits.canceller().cancel();
    assert_eq!(collect(waits).1.unwrap(), FinishReason::Cancelled);
    // Another request can have the page that it held.
    wait_for(2, 1);
}

/// An engine that ends does not wait for a disk that does not answer.
#[cfg(target_os = "linux")]
#[test]
fn an_engine_ends_without_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let first = request(7, 70, 5);
    let (wanted, _) = run(&open_stored(hybrid_file(), folder.path()), first.clone());
    pipes(folder.path(), 2);
    let engine = open_stored(hybrid_file(), folder.path());
    let waits = engine.submit(first).unwrap();
    drop(engine);
    let (tokens, end) = collect_all(waits);
    assert_eq!((tokens, end.unwrap()), (wanted, (FinishReason::Length, 0)));
}

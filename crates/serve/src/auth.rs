//! API keys: who may call the server, and how much.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, header};
use bodkin::Reporter;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::{ApiError, Result};
use crate::options::ServerOptions;

/// How often the key file is looked at.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// The hash of a key. Hashes are compared in constant time, whatever the lengths of the keys.
type KeyHash = [u8; 32];

/// The most bytes of a file of keys or certificates.
const KEY_FILE_BYTES: u64 = 1 << 20;

/// What a key may do in a minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KeyLimits {
    requests: Option<u64>,
    tokens: Option<u64>,
}

/// How long the limits of a key last.
const WINDOW: Duration = Duration::from_secs(60);

/// The keys of a server.
pub(crate) struct ApiKeys {
    /// Given on the command line.
    fixed: Vec<KeyHash>,
    file: Option<PathBuf>,
    /// Where changes of the file that cannot be followed are said.
    reporter: Reporter,
    state: Mutex<KeyState>,
}

#[derive(Default)]
struct KeyState {
    keys: Vec<(KeyHash, KeyLimits)>,
    checked: Option<Instant>,
    modified: Option<SystemTime>,
    /// What was last said about the file, which is said once.
    said: String,
    used: HashMap<KeyHash, Window>,
}

/// What a key has used in the current minute.
struct Window {
    began: Instant,
    requests: u64,
    tokens: u64,
}

/// A key that was presented and is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller(Option<KeyHash>);

fn hash(key: &str) -> KeyHash {
    Sha256::digest(key.as_bytes()).into()
}

/// The text of a file of keys or certificates, which is small; a device may have no end.
pub(crate) fn read_key_file(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(KEY_FILE_BYTES + 1).read_to_string(&mut text)?;
    match read as u64 {
        ..=KEY_FILE_BYTES => Ok(text),
        _ => Err(std::io::Error::other(format!("expected at most {KEY_FILE_BYTES} bytes"))),
    }
}

impl ApiKeys {
    /// Reads the key file.
    ///
    /// # Errors
    /// If it cannot be read or has a line that is no key, or a given key is empty.
    pub(crate) fn new(
        options: &ServerOptions,
        reporter: Reporter,
    ) -> std::result::Result<ApiKeys, String> {
        if options.api_keys.iter().any(|key| key.trim().is_empty()) {
            let message = "--api-key or BODKIN_API_KEY: expected a key, found an empty text";
            return Err(message.to_owned());
        }
        let keys = ApiKeys {
            fixed: options.api_keys.iter().map(|key| hash(key)).collect(),
            file: options.api_key_file.clone(),
            reporter,
            state: Mutex::default(),
        };
        let wrong = keys.reload(&mut keys.state())?;
        match wrong {
            None => Ok(keys),
            Some(wrong_line) => Err(wrong_line),
        }
    }

    fn state(&self) -> MutexGuard<'_, KeyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everybody is answered.
    pub(crate) fn is_open(&self) -> bool {
        self.fixed.is_empty() && self.file.is_none()
    }

    /// Reads the file again if it has changed. Returns the first line that is no key; the keys of
    /// the others are valid from now on, and no key that is not among them.
    fn reload(&self, state: &mut KeyState) -> std::result::Result<Option<String>, String> {
        let Some(path) = &self.file else { return Ok(None) };
        let failed = |error| format!("{}: {error}", path.display());
        let modified = path.metadata().and_then(|m| m.modified()).map_err(failed)?;
        if state.modified == Some(modified) {
            return Ok(None);
        }
        let text = read_key_file(path).map_err(failed)?;
        let (keys, wrong_line) = parse_keys(&text);
        (state.keys, state.modified) = (keys, Some(modified));
        Ok(wrong_line.map(|error| format!("{}: {error}", path.display())))
    }

    /// Reads the file again now and then, and says what is wrong with it.
    fn refresh(&self, state: &mut KeyState, now: Instant) {
        if state.checked.is_some_and(|checked| now - checked <= CHECK_EVERY) {
            return;
        }
        state.checked = Some(now);
        let wrong = match self.reload(state) {
            Ok(None) => return state.said.clear(),
            Ok(Some(line)) => format!("{line}; the keys of the other lines are valid"),
            Err(error) => format!("{error}; the keys of before stay valid"),
        };
        if state.said != wrong {
            self.reporter.note(&wrong);
            tracing::warn!("{wrong}");
            state.said = wrong;
        }
    }

    /// Checks the key of a request and counts the request.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<Caller> {
        if self.is_open() {
            return Ok(Caller(None));
        }
        let presented = hash(presented_key(headers).ok_or_else(ApiError::unauthorized)?);
        let mut state = self.state();
        let now = Instant::now();
        self.refresh(&mut state, now);
        let limits = self.limits(&state, presented).ok_or_else(ApiError::unauthorized)?;
        let window = state.window(presented, now);
        let used_up = |what: &str| {
            let message = format!("the key's {what} of this minute are used up");
            ApiError::rate_limited(message, window.seconds_left(now))
        };
        if limits.requests.is_some_and(|limit| window.requests >= limit) {
            return Err(used_up("requests"));
        }
        if limits.tokens.is_some_and(|limit| window.tokens >= limit) {
            return Err(used_up("tokens"));
        }
        window.requests += 1;
        Ok(Caller(Some(presented)))
    }

    /// What a key may do; none if it is not valid.
    fn limits(&self, state: &KeyState, presented: KeyHash) -> Option<KeyLimits> {
        let is_fixed =
            self.fixed.iter().fold(false, |any, key| any | bool::from(key.ct_eq(&presented)));
        let in_file = state.keys.iter().filter(|(key, _)| bool::from(key.ct_eq(&presented)));
        let in_file = in_file.map(|(_, limits)| *limits).next_back();
        if is_fixed { Some(KeyLimits::default()) } else { in_file }
    }

    /// How many tokens the key of a request has left in this minute, of which those of its `prompt`
    /// are counted; none for no limit.
    ///
    /// # Errors
    /// If they are fewer than the `least` that the request needs.
    fn admit_tokens(&self, caller: Caller, prompt: usize, least: usize) -> Result<Option<usize>> {
        let Some(key) = caller.0 else { return Ok(None) };
        let (mut state, now) = (self.state(), Instant::now());
        let Some(limit) = self.limits(&state, key).and_then(|limits| limits.tokens) else {
            return Ok(None);
        };
        let window = state.window(key, now);
        let left = usize::try_from(limit.saturating_sub(window.tokens)).unwrap_or(usize::MAX);
        if least <= left {
            window.tokens += prompt as u64;
            return Ok(Some(left));
        }
        let message = format!(
            "the key has {left} of its {limit} tokens of this minute left, and the request needs \
             at least {least}"
        );
        Err(ApiError::rate_limited(message, window.seconds_left(now)))
    }

    /// Counts tokens that a request has used.
    pub(crate) fn count_tokens(&self, caller: Caller, tokens: usize) {
        if let Some(key) = caller.0 {
            self.state().window(key, Instant::now()).tokens += tokens as u64;
        }
    }
}

/// Counts the tokens of a request against the limits of its key: those of its prompts at first,
/// those of its answers as they come.
pub(crate) struct TokenCounter {
    keys: Arc<ApiKeys>,
    caller: Caller,
}

impl TokenCounter {
    pub(crate) fn new(keys: &Arc<ApiKeys>, caller: Caller) -> TokenCounter {
        TokenCounter { keys: Arc::clone(keys), caller }
    }

    pub(crate) fn count(&self, tokens: usize) {
        self.keys.count_tokens(self.caller, tokens);
    }

    /// Takes the tokens of prompts back that were not read after all.
    pub(crate) fn give_back(&self, tokens: usize) {
        if let Some(key) = self.caller.0 {
            let mut state = self.keys.state();
            let window = state.window(key, Instant::now());
            window.tokens = window.tokens.saturating_sub(tokens as u64);
        }
    }

    /// How many tokens each of some answers may have, if prompts have `prompt` tokens and a request
    /// asks for at most `max_tokens`; none for no limit.
    ///
    /// # Errors
    /// If the key has fewer tokens left than prompts and answers need.
    pub(crate) fn admit(
        &self,
        prompt: usize,
        answers: usize,
        max_tokens: Option<usize>,
    ) -> Result<Option<usize>> {
        let least = prompt + answers * max_tokens.unwrap_or(1).min(1);
        let Some(left) = self.keys.admit_tokens(self.caller, prompt, least)? else {
            return Ok(max_tokens);
        };
        let share = (left - prompt) / answers.max(1);
        Ok(Some(max_tokens.map_or(share, |most| most.min(share))))
    }
}

impl KeyState {
    fn window(&mut self, key: KeyHash, now: Instant) -> &mut Window {
        let fresh = || Window { began: now, requests: 0, tokens: 0 };
        let window = self.used.entry(key).or_insert_with(fresh);
        if now - window.began >= WINDOW {
            *window = fresh();
        }
        window
    }
}

impl Window {
    /// Whole seconds until it ends, at least one.
    fn seconds_left(&self, now: Instant) -> u64 {
        WINDOW.saturating_sub(now - self.began).as_secs() + 1
    }
}

/// The key that a request presents, as OpenAI's or Anthropic's clients do.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| value.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    let key = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    bearer.map(|(_, key)| key.trim()).or(key)
}

/// Lines of a key and of limits, such as `key requests=60 tokens=100000`. A word that starts with
/// `#` begins a comment. Returns the keys of all lines that are right, and what is wrong with the
/// first other one.
fn parse_keys(text: &str) -> (Vec<(KeyHash, KeyLimits)>, Option<String>) {
    let (mut keys, mut wrong) = (Vec::new(), None);
    for (number, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(key) = words.next() else { continue };
        match limits_of(words) {
            Some(limits) => keys.push((hash(key), limits)),
            None => {
                let expected = "expected requests=N or tokens=N a minute after the key";
                wrong.get_or_insert_with(|| format!("line {}: {expected}", number + 1));
            }
        }
    }
    (keys, wrong)
}

/// The limits behind a key.
fn limits_of<'a>(words: impl Iterator<Item = &'a str>) -> Option<KeyLimits> {
    let mut limits = KeyLimits::default();
    for word in words {
        let (name, number) = word.split_once('=')?;
        let number = Some(number.parse().ok()?);
        match name {
            "requests" => limits.requests = number,
            "tokens" => limits.tokens = number,
            _ => return None,
        }
    }
    Some(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        [(header::HeaderName::from_static(name), value.parse().unwrap())].into_iter().collect()
    }

    fn keys(options: ServerOptions) -> ApiKeys {
        ApiKeys::new(&options, Reporter::default()).unwrap()
    }

    #[test]
    fn keys_come_in_two_headers() {
        let keys = keys(ServerOptions { api_keys: vec!["sk 1".into()], ..Default::default() });
        assert!(keys.admit(&headers("authorization", "Bearer sk 1")).is_ok());
        assert!(keys.admit(&headers("authorization", "bearer  sk 1 ")).is_ok());
        assert!(keys.admit(&headers("x-api-key", "sk 1")).is_ok());
        for (name, value) in [("authorization", "sk 1"), ("x-api-key", "sk 2"), ("cookie", "")] {
            let error = keys.admit(&headers(name, value)).unwrap_err();
            assert_eq!(error.status.as_u16(), 401, "{name}: {value}");
        }
        assert!(self::keys(ServerOptions::default()).admit(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn a_comment_begins_after_white_space() {
        let (keys, wrong) = parse_keys("#all\nsk#secret requests=1 #few\n  # none\nb# #\n");
        assert_eq!(wrong, None);
        let limits = KeyLimits { requests: Some(1), tokens: None };
        assert_eq!(keys, [(hash("sk#secret"), limits), (hash("b#"), KeyLimits::default())]);
    }

    #[test]
    fn a_key_file_has_limits_and_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# all\na requests=2\nb tokens=10 # small\n").unwrap();
        let keys = keys(ServerOptions { api_key_file: Some(path.clone()), ..Default::default() });
        let admit =
            |key: &str| keys.admit(&headers("x-api-key", key)).map_err(|e| e.status.as_u16());
        assert_eq!((0..3).map(|_| admit("a").err()).collect::<Vec<_>>(), [None, None, Some(429)]);
        let caller = admit("b").unwrap();
        keys.count_tokens(caller, 10);
        assert_eq!(admit("b").err(), Some(429));
        assert_eq!(admit("c").err(), Some(401));
        std::fs::write(&path, "c\n").unwrap();
        let later = SystemTime::now() + Duration::from_secs(5);
        std::fs::File::open(&path).unwrap().set_modified(later).unwrap();
        keys.state().checked = None;
        assert_eq!((admit("c").err(), admit("a").err()), (None, Some(401)));
        std::fs::write(&path, "c what=1\n").unwrap();
        let options = ServerOptions { api_key_file: Some(path), ..Default::default() };
        let error = ApiKeys::new(&options, Reporter::default()).err().unwrap();
        assert!(error.contains("line 1: expected requests=N"), "{error}");
    }

    /// A key that is taken out of the file is no key any more, whatever is wrong with other lines.
    #[test]
    fn a_typo_in_the_file_keeps_no_key_of_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "a\nb\n").unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&said);
        let reporter = Reporter::new(move |progress| {
            if let bodkin::Progress::Note(text) = progress {
                notes.lock().unwrap().push(text.to_owned());
            }
        });
        let options = ServerOptions { api_key_file: Some(path.clone()), ..Default::default() };
        let keys = ApiKeys::new(&options, reporter).unwrap();
        let is_valid = |key: &str| {
            keys.state().checked = None;
            keys.admit(&headers("x-api-key", key)).is_ok()
        };
        assert!(is_valid("a") && is_valid("b"));
        std::fs::write(&path, "b\nc request=1\n").unwrap();
        let later = SystemTime::now() + Duration::from_secs(5);
        std::fs::File::open(&path).unwrap().set_modified(later).unwrap();
        assert!(!is_valid("a") && is_valid("b") && !is_valid("c"));
        std::fs::remove_file(&path).unwrap();
        assert!(is_valid("b") && is_valid("b"));
        let said = said.lock().unwrap();
        assert!(said.len() == 2 && said[0].contains("line 2: expected requests=N"), "{said:?}");
        assert!(said[1].contains("keys of before stay valid"), "{said:?}");
    }

    #[test]
    fn an_empty_text_is_no_key() {
        for key in ["", "  "] {
            let options = ServerOptions { api_keys: vec![key.to_owned()], ..Default::default() };
            let error = ApiKeys::new(&options, Reporter::default()).err().unwrap();
            assert!(error.contains("expected a key, found an empty text"), "{error}");
        }
    }

    #[test]
    fn a_request_has_the_tokens_that_its_key_has_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "a tokens=10\n").unwrap();
        let keys = keys(ServerOptions { api_key_file: Some(path), ..Default::default() });
        let caller = keys.admit(&headers("x-api-key", "a")).unwrap();
        assert_eq!(keys.admit_tokens(caller, 3, 10).unwrap(), Some(10));
        keys.count_tokens(caller, 1);
        assert_eq!(keys.admit_tokens(caller, 0, 6).unwrap(), Some(6));
        let error = keys.admit_tokens(caller, 0, 7).unwrap_err();
        assert!(error.message.contains("6 of its 10 tokens"), "{}", error.message);
        assert!((59..=60).contains(&error.retry_after), "{}", error.retry_after);
    }

    #[cfg(unix)]
    #[test]
    fn a_key_file_without_an_end_is_an_error() {
        let error = read_key_file(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(error, format!("expected at most {KEY_FILE_BYTES} bytes"));
    }
}

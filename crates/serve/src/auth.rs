//! API keys: who may call the server, and how much.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, header};
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

/// The keys of a server.
pub(crate) struct ApiKeys {
    /// Given on the command line.
    fixed: Vec<KeyHash>,
    file: Option<PathBuf>,
    state: Mutex<KeyState>,
}

#[derive(Default)]
struct KeyState {
    keys: Vec<(KeyHash, KeyLimits)>,
    checked: Option<Instant>,
    modified: Option<SystemTime>,
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
    /// If it cannot be read or has a line that is no key.
    pub(crate) fn new(options: &ServerOptions) -> std::result::Result<ApiKeys, String> {
        let keys = ApiKeys {
            fixed: options.api_keys.iter().map(|key| hash(key)).collect(),
            file: options.api_key_file.clone(),
            state: Mutex::default(),
        };
        keys.reload(&mut keys.state())?;
        Ok(keys)
    }

    fn state(&self) -> MutexGuard<'_, KeyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everybody is answered.
    pub(crate) fn is_open(&self) -> bool {
        self.fixed.is_empty() && self.file.is_none()
    }

    /// Reads the file again if it has changed.
    fn reload(&self, state: &mut KeyState) -> std::result::Result<(), String> {
        let Some(path) = &self.file else { return Ok(()) };
        let failed = |error| format!("{}: {error}", path.display());
        let modified = path.metadata().and_then(|m| m.modified()).map_err(failed)?;
        if state.modified == Some(modified) {
            return Ok(());
        }
        let text = read_key_file(path).map_err(failed)?;
        state.keys = parse_keys(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        state.modified = Some(modified);
        Ok(())
    }

    /// Checks the key of a request and counts the request.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<Caller> {
        if self.is_open() {
            return Ok(Caller(None));
        }
        let presented = hash(presented_key(headers).ok_or_else(ApiError::unauthorized)?);
        let mut state = self.state();
        let now = Instant::now();
        if state.checked.is_none_or(|checked| now - checked > CHECK_EVERY) {
            state.checked = Some(now);
            if let Err(error) = self.reload(&mut state) {
                // The keys of before stay valid.
                tracing::warn!("{error}");
            }
        }
        let is_fixed =
            self.fixed.iter().fold(false, |any, key| any | bool::from(key.ct_eq(&presented)));
        let in_file = state.keys.iter().filter(|(key, _)| bool::from(key.ct_eq(&presented)));
        let limits = in_file.map(|(_, limits)| *limits).next_back();
        let limits = match (is_fixed, limits) {
            (true, _) => KeyLimits::default(),
            (false, Some(limits)) => limits,
            (false, None) => return Err(ApiError::unauthorized()),
        };
        let window = state.window(presented, now);
        if limits.requests.is_some_and(|limit| window.requests >= limit) {
            return Err(ApiError::rate_limited("the key's requests of this minute are used up"));
        }
        if limits.tokens.is_some_and(|limit| window.tokens >= limit) {
            return Err(ApiError::rate_limited("the key's tokens of this minute are used up"));
        }
        window.requests += 1;
        Ok(Caller(Some(presented)))
    }

    /// Counts tokens that a request has used.
    pub(crate) fn count_tokens(&self, caller: Caller, tokens: usize) {
        if let Some(key) = caller.0 {
            self.state().window(key, Instant::now()).tokens += tokens as u64;
        }
    }
}

impl KeyState {
    fn window(&mut self, key: KeyHash, now: Instant) -> &mut Window {
        let fresh = || Window { began: now, requests: 0, tokens: 0 };
        let window = self.used.entry(key).or_insert_with(fresh);
        if now - window.began >= Duration::from_secs(60) {
            *window = fresh();
        }
        window
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
/// `#` begins a comment.
fn parse_keys(text: &str) -> std::result::Result<Vec<(KeyHash, KeyLimits)>, String> {
    let mut keys = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(key) = words.next() else { continue };
        let mut limits = KeyLimits::default();
        for word in words {
            let limit = word.split_once('=').and_then(|(name, n)| Some((name, n.parse().ok()?)));
            match limit {
                Some(("requests", n)) => limits.requests = Some(n),
                Some(("tokens", n)) => limits.tokens = Some(n),
                _ => {
                    let line = number + 1;
                    return Err(format!(
                        "line {line}: expected requests=N or tokens=N a minute after the key"
                    ));
                }
            }
        }
        keys.push((hash(key), limits));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        [(header::HeaderName::from_static(name), value.parse().unwrap())].into_iter().collect()
    }

    fn keys(options: ServerOptions) -> ApiKeys {
        ApiKeys::new(&options).unwrap()
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
        let keys = parse_keys("#all\nsk#secret requests=1 #few\n  # none\nb# #\n").unwrap();
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
        assert!(
            ApiKeys::new(&ServerOptions { api_key_file: Some(path.clone()), ..Default::default() })
                .is_err()
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_key_file_without_an_end_is_an_error() {
        let error = read_key_file(Path::new("/dev/zero")).unwrap_err().to_string();
        assert_eq!(error, format!("expected at most {KEY_FILE_BYTES} bytes"));
    }
}

//! HTTP: small documents, and files that are verified by their hash. A download resumes where an
//! earlier one ended, in this run or in the last, and tries again when a connection is cut, stalls
//! or a server is busy. This module must not know what servers offer.

use std::io::{ErrorKind, Read, Write};
use std::thread::sleep;
use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, Uri};
use ureq::{Agent, Body, Timeout};

use super::intake::{Intake, expect_sha256};
use super::version::Version;
use crate::error::{Error, Result};
use crate::progress::{Phase, Reporter};

/// Larger documents (lists of files, manifests) are not read.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection that delivers nothing for this long has stalled.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Sets the stall timeout in seconds, as for the Hugging Face hub's own tools.
const STALL_VARIABLE: &str = "HF_HUB_DOWNLOAD_TIMEOUT";
/// Where a proxy is named: the first that is set is used for every address.
const PROXY_VARIABLES: [&str; 6] =
    ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];
/// A whole document takes no longer; a file may take as long as bytes arrive.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(300);
/// Failures in a row, without a new byte, that end a request. The pauses between those of a
/// download add up to one and a half minutes.
const DOCUMENT_FAILURES: u32 = 3;
const DOWNLOAD_FAILURES: u32 = 9;
/// The first pause; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A server that asks for a longer pause is not waited for.
const ASKED_PAUSE_MAX: Duration = Duration::from_secs(300);

/// Why a download starts again, after "as the server".
const UNNAMED: &str = " named no version of it";
const CHANGED: &str = "'s has changed";

/// A file on a server.
pub(crate) struct Remote<'a> {
    /// What is fetched, for messages.
    pub(crate) what: String,
    pub(crate) url: String,
    pub(crate) bytes: u64,
    /// Hexadecimal; `None` if the server names no hash.
    pub(crate) sha256: Option<&'a str>,
}

/// Why a request failed, and whether it may succeed later.
enum Failure {
    /// It would fail again.
    Final(Box<Error>),
    /// There is no connection to this host, with the reason in parentheses. During a download it
    /// may come back.
    Unreachable(String),
    /// The connection or the server failed; the server may ask for a pause.
    Temporary(String, Option<Duration>),
}

/// Speaks HTTP with one server, and with those that it redirects to.
pub(crate) struct Client<'a> {
    pub(crate) reporter: &'a Reporter,
    agent: Agent,
    /// The header `Authorization`, which is not sent to other hosts.
    authorization: Option<String>,
    /// What it means that the server refuses or does not find something.
    refusal: &'static str,
}

impl<'a> Client<'a> {
    pub(crate) fn new(
        token: Option<&str>,
        refusal: &'static str,
        reporter: &'a Reporter,
    ) -> Client<'a> {
        let seconds = std::env::var(STALL_VARIABLE).ok().and_then(|text| text.parse().ok());
        let stall = seconds.filter(|s| *s > 0).map_or(STALL_TIMEOUT, Duration::from_secs);
        let config = Agent::config_builder()
            .user_agent(concat!("bodkin/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(stall));
        let agent = Agent::new_with_config(config.build());
        let authorization = token.map(|token| format!("Bearer {token}"));
        Client { reporter, agent, authorization, refusal }
    }

    /// Fetches a small document about `what`.
    pub(crate) fn document(&self, what: &str, url: &str, accept: &str) -> Result<Vec<u8>> {
        let mut retry = Retry { what, failures: 0, most: DOCUMENT_FAILURES };
        loop {
            let read = |mut response: Response<Body>| {
                let body = response.body_mut().with_config().limit(DOCUMENT_BYTES_MAX);
                body.read_to_vec().map_err(|error| self.failure(error, what, url))
            };
            match self.get(what, url, &[("Accept", accept)], Some(DOCUMENT_TIMEOUT)).and_then(read)
            {
                Ok(bytes) => return Ok(bytes),
                Err(Failure::Unreachable(hosts)) => return Err(Error::Unreachable { hosts }),
                Err(failure) => retry.pause(failure, self.reporter)?,
            }
        }
    }

    /// Appends the missing bytes to `file`, the beginning of a download; of this version, if its
    /// hash is not known. An error leaves what the next download can go on from.
    pub(crate) fn download(
        &self,
        remote: &Remote,
        mut file: Intake,
        mut version: Option<Version>,
    ) -> Result<Intake> {
        let Remote { what, bytes, .. } = remote;
        let phase = self.reporter.begin(&format!("downloading {what}"), Some(*bytes));
        let mut retry = Retry { what, failures: 0, most: DOWNLOAD_FAILURES };
        let mut reached = file.bytes();
        while file.bytes() < *bytes {
            if let Err(failure) = self.receive(remote, &mut file, version.as_mut(), &phase) {
                if file.bytes() > reached {
                    (reached, retry.failures) = (file.bytes(), 0);
                }
                retry.pause(failure, self.reporter)?;
            }
        }
        let found = file.sha256();
        if let Err(error) = remote.sha256.map_or(Ok(()), |it| expect_sha256(what, it, &found)) {
            // If the wrong bytes stay, the next download finds them again.
            file.restart()?;
            return Err(error);
        }
        Ok(file)
    }

    /// Appends to `file` what one connection delivers of the missing bytes.
    fn receive(
        &self,
        remote: &Remote,
        file: &mut Intake,
        version: Option<&mut Version>,
        phase: &Phase<'_>,
    ) -> Result<(), Failure> {
        let Remote { what, url, bytes, .. } = remote;
        let restart = |file: &mut Intake, reason: &str| {
            self.reporter.note(&format!("{what}: starting again, as the server{reason}"));
            file.restart()
        };
        if file.bytes() > 0 && version.as_ref().is_some_and(|version| version.name().is_none()) {
            restart(file, UNNAMED)?;
        }
        let start = file.bytes();
        phase.set(start);
        let range = format!("bytes={start}-");
        let wanted = version.as_ref().and_then(|version| version.name());
        let headers = match start {
            0 => vec![("Accept", "*/*")],
            _ => [Some(("Range", range.as_str())), wanted.map(|name| ("If-Range", name))]
                .into_iter()
                .flatten()
                .collect(),
        };
        let response = self.get(what, url, &headers, None)?;
        if response.status() == 206 {
            let found = text(response.headers(), "content-range").unwrap_or_default();
            if !found.starts_with(&format!("bytes {start}-")) {
                let expected = format!("the bytes from {start}");
                return Err(Error::mismatch(what, expected, format!("`{found}`")).into());
            }
            if version.as_ref().is_some_and(|version| !version.is_of(response.headers())) {
                restart(file, CHANGED)?;
                return Err(Failure::Temporary("another version was sent".to_owned(), None));
            }
        } else if start > 0 {
            // The server sends the whole file, or what is here is no beginning of it.
            match wanted {
                Some(_) => restart(file, CHANGED)?,
                None => file.restart()?,
            }
        }
        if let Some(version) = version.filter(|_| response.status() == 200) {
            version.begin(response.headers())?;
        }
        if response.status() == 416 {
            return Err(Failure::Temporary(response.status().to_string(), None));
        }
        let mut body = response.into_body().into_reader().take(bytes - file.bytes());
        let mut buffer = vec![0; 1 << 18];
        while file.bytes() < *bytes {
            let read = body.read(&mut buffer);
            let read = read.map_err(|error| self.failure(error.into(), what, url))?;
            if read == 0 {
                let reason =
                    format!("the connection ended after {} of {bytes} bytes", file.bytes());
                return Err(Failure::Temporary(reason, None));
            }
            let stored = file.write_all(&buffer[..read]);
            stored.map_err(Error::io(format!("cannot store {what}")))?;
            phase.set(file.bytes());
        }
        Ok(())
    }

    /// A response with a body, or one that says that the range is wrong. `limit` is for all of it.
    fn get(
        &self,
        what: &str,
        url: &str,
        headers: &[(&str, &str)],
        limit: Option<Duration>,
    ) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.get(url).config().timeout_global(limit).build();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let response = request.call().map_err(|error| self.failure(error, what, url))?;
        let status = response.status();
        let refused = |reason: String| Err(failed(what, reason).into());
        match status.as_u16() {
            200 | 206 | 416 => Ok(response),
            408 | 425 | 429 | 500.. => match asked_pause(response.headers()) {
                Some(pause) if pause > ASKED_PAUSE_MAX => {
                    refused(format!("{status}; try again in {} minutes", pause.as_secs() / 60))
                }
                pause => Err(Failure::Temporary(status.to_string(), pause)),
            },
            401 | 403 | 404 => refused(format!("{status}: {}", self.refusal)),
            _ => refused(status.to_string()),
        }
    }

    /// Why a request of `url` failed, with the proxy that it went through.
    fn failure(&self, error: ureq::Error, what: &str, url: &str) -> Failure {
        let proxy = self.proxy(url);
        match Failure::of(error, what) {
            Failure::Unreachable(reason) => {
                let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
                let host = rest.split('/').next().unwrap_or(rest);
                // The number of an error of the system is for programmers.
                let reason = reason.split(" (os error").next().unwrap_or(&reason);
                Failure::Unreachable(format!("{host} ({reason}{proxy})"))
            }
            Failure::Final(error) => match *error {
                Error::Download { from, reason } => failed(&from, reason + &proxy).into(),
                error => error.into(),
            },
            temporary => temporary,
        }
    }

    /// The proxy that requests of `url` go through, after a comma; its password is not for eyes.
    fn proxy(&self, url: &str) -> String {
        let Some(proxy) = self.agent.config().proxy() else { return String::new() };
        if url.parse().is_ok_and(|uri| proxy.is_no_proxy(&uri)) {
            return String::new();
        }
        let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let name = PROXY_VARIABLES.into_iter().find(is_set).unwrap_or("the system");
        format!(", through the proxy {}:{} of {name}", proxy.host(), proxy.port())
    }
}

/// The address of a server, which the user may set by a variable, without a slash at its end.
pub(crate) fn address(variable: &'static str, default: &str) -> Result<String> {
    let set = std::env::var(variable).ok().filter(|address| !address.is_empty());
    let Some(address) = set else { return Ok(default.to_owned()) };
    let is_web = |uri: Uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
    };
    match address.parse().is_ok_and(is_web) {
        true => Ok(address.trim_end_matches('/').to_owned()),
        false => {
            let expected = format!("an address such as {default}");
            Err(Error::mismatch(variable, expected, format!("`{address}`")))
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Final(Box::new(error))
    }
}

impl Failure {
    fn of(error: ureq::Error, what: &str) -> Failure {
        use ErrorKind as Kind;
        use ureq::Error as Http;
        match error {
            Http::Timeout(Timeout::Resolve | Timeout::Connect)
            | Http::HostNotFound
            | Http::ConnectionFailed => Failure::Unreachable(error.to_string()),
            Http::Timeout(Timeout::Global) => {
                failed(what, format!("took longer than {} seconds", DOCUMENT_TIMEOUT.as_secs()))
                    .into()
            }
            Http::Timeout(_) => Failure::Temporary("the connection has stalled".to_owned(), None),
            Http::Protocol(_) => Failure::Temporary(error.to_string(), None),
            Http::Io(error) => match error.kind() {
                // A certificate, for example.
                Kind::InvalidData => failed(what, error.to_string()).into(),
                Kind::UnexpectedEof
                | Kind::ConnectionReset
                | Kind::ConnectionAborted
                | Kind::BrokenPipe
                | Kind::TimedOut => {
                    Failure::Temporary(format!("the connection was cut ({error})"), None)
                }
                _ => Failure::Unreachable(error.to_string()),
            },
            _ => failed(what, error.to_string()).into(),
        }
    }
}

/// The pauses between the tries of a request.
struct Retry<'a> {
    what: &'a str,
    /// Failures in a row.
    failures: u32,
    most: u32,
}

impl Retry<'_> {
    /// Waits before the next try, or fails if there is to be none.
    fn pause(&mut self, failure: Failure, reporter: &Reporter) -> Result<()> {
        let (reason, asked) = match failure {
            Failure::Final(error) => return Err(*error),
            Failure::Unreachable(host) => (format!("{host} could not be reached"), None),
            Failure::Temporary(reason, asked) => (reason, asked),
        };
        let pause = asked.unwrap_or(PAUSE_MAX.min(PAUSE * (1 << self.failures)));
        self.failures += 1;
        if self.failures == self.most {
            return Err(failed(self.what, format!("{reason}, {} times in a row", self.most)));
        }
        let seconds = pause.as_secs_f64();
        reporter.note(&format!("{}: {reason}; trying again in {seconds:.1} s", self.what));
        sleep(pause);
        Ok(())
    }
}

fn failed(what: &str, reason: String) -> Error {
    Error::Download { from: what.to_owned(), reason }
}

/// The pause that a busy server asks for, by the standard header or by that of the Hugging Face
/// hub (`"api";r=0;t=55`).
fn asked_pause(headers: &HeaderMap) -> Option<Duration> {
    let limit =
        || text(headers, "ratelimit")?.split(';').find_map(|it| it.trim().strip_prefix("t="));
    let seconds = text(headers, "retry-after").or_else(limit)?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

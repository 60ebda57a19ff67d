//! Which web pages may call the server. A browser lets a page of any origin send a POST of plain
//! text to any address without asking first, so such requests are refused by their `Origin`.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use tower_http::cors::{AllowHeaders, Any, CorsLayer};

use crate::app::SharedApp;
use crate::error::{ApiError, Result};
use crate::server::Error;

/// Checks the origins that the server was given.
pub(crate) fn check(allowed: &[String]) -> std::result::Result<(), Error> {
    let is_origin = |text: &str| {
        let uri = text.parse::<Uri>().ok();
        let parts = uri.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.authority()?)));
        parts.is_some_and(|(scheme, authority)| text == format!("{scheme}://{authority}"))
    };
    let is_known = |text: &String| matches!(text.as_str(), "*" | "null") || is_origin(text);
    match allowed.iter().find(|text| !is_known(text)) {
        None => Ok(()),
        Some(text) => Err(Error::Origin(text.clone())),
    }
}

/// Tells browsers which origins may read answers.
pub(crate) fn cors(allowed: &[String]) -> CorsLayer {
    let layer = CorsLayer::new().allow_methods([Method::GET, Method::POST, Method::DELETE]);
    // A star does not stand for `Authorization`.
    let layer = layer.allow_headers(AllowHeaders::mirror_request());
    let shown = [header::RETRY_AFTER, HeaderName::from_static("x-request-id")];
    let layer = layer.expose_headers(shown);
    if allowed.iter().any(|origin| origin == "*") {
        return layer.allow_origin(Any);
    }
    let origins = allowed.iter().filter_map(|origin| origin.parse().ok());
    layer.allow_origin(origins.collect::<Vec<_>>())
}

/// Refuses requests of web pages that are neither the server's own nor of an allowed origin. GET
/// requests of a page that takes itself for the server's own have no `Origin`: where everybody on
/// this machine is answered, the host that they were sent to decides.
pub(crate) async fn refuse_others(
    State(app): State<SharedApp>,
    request: Request,
    next: Next,
) -> Result<Response> {
    let headers = request.headers();
    let host = headers.get(header::HOST).map(|host| host.to_str().unwrap_or(""));
    let allowed = &app.options.cors_origins;
    if !may_call(headers, host, allowed) {
        let message = "web pages of this origin may not call the server: see --cors-origin";
        return Err(ApiError::forbidden(message));
    }
    let is_private = app.options.host.to_canonical().is_loopback() && app.keys.is_open();
    if is_private && !host.is_none_or(|host| is_fixed(host) || is_allowed(host, allowed)) {
        let message = "without API keys this server answers only requests to localhost or an IP \
                       address: --cors-origin http://HOST:PORT allows another name";
        return Err(ApiError::forbidden(message));
    }
    Ok(next.run(request).await)
}

/// Whether pages of a host, with its port, may call the server.
fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let is_its_origin = |origin: &String| {
        origin.split_once("://").is_some_and(|(_, name)| name.eq_ignore_ascii_case(host))
    };
    allowed.iter().any(|origin| origin == "*" || is_its_origin(origin))
}

/// Whether a host's name always leads to the same machine. Who owns another name can let it lead
/// to this server after a browser has loaded a page from it (DNS rebinding): the origin of the page
/// is the `Host` of its requests then.
fn is_fixed(host: &str) -> bool {
    let without_port = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = without_port.trim_end_matches('.').to_ascii_lowercase();
    let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&name);
    name == "localhost" || name.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

fn may_call(headers: &HeaderMap, own: Option<&str>, allowed: &[String]) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let Ok(origin) = origin.to_str() else { return false };
    let host = origin.split_once("://").map(|(_, host)| host);
    let is_own = host.zip(own).is_some_and(|(host, own)| host.eq_ignore_ascii_case(own));
    let is_own = is_own && own.is_some_and(is_fixed);
    is_own || allowed.iter().any(|allowed| allowed == "*" || allowed == origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_allowed_with_its_port_by_an_origin_of_it() {
        let allowed = ["http://One.example:8080".to_owned()];
        for (host, is) in [
            ("one.EXAMPLE:8080", true),
            ("one.example", false),
            ("one.example:80", false),
            ("", false),
        ] {
            assert_eq!(is_allowed(host, &allowed), is, "{host}");
        }
        assert!(is_allowed("any", &["*".to_owned()]) && !is_allowed("any", &[]));
    }

    #[test]
    fn a_page_is_the_servers_own_only_where_nobody_else_has_the_name() {
        for (host, is_own) in [
            ("127.0.0.1:8080", true),
            ("192.168.0.9", true),
            ("[::1]:8080", true),
            ("[::1]", true),
            ("localhost:8080", true),
            ("App.Localhost", true),
            ("evil.example:8080", false),
            ("localhost.evil.example", false),
            ("gpu-box", false),
            ("", false),
        ] {
            let headers = [(header::ORIGIN, format!("http://{host}").parse().unwrap())];
            assert_eq!(may_call(&headers.into_iter().collect(), Some(host), &[]), is_own, "{host}");
        }
    }
}

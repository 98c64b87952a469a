//! Who may ask: the names under which the server may be reached, where a request may come from, and the token.

use super::http::{Refusal, Request, Response};
use anyhow::{Result, anyhow, bail};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

/// Whether requests need a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    Demanded,
    Dropped,
}

/// The rules of one server.
#[derive(Debug)]
pub struct Access {
    /// Absent if the user dropped it: then every user of the machine can read the runs.
    token: Option<String>,
    /// A token for one use, for the command line of a browser, which other users of the machine can read.
    once: Mutex<Option<String>>,
    /// Cookies are shared by all ports of a host, so that of each server has a separate name.
    cookie: String,
    is_loopback: bool,
    /// The name of the machine, by which others may reach it.
    host_name: String,
}

impl Access {
    /// The rules of a server at an address. Only on loopback may the token be dropped.
    pub fn new(address: SocketAddr, host_name: String, token: Token) -> Result<Self> {
        let is_loopback = address.ip().is_loopback();
        if token == Token::Dropped && !is_loopback {
            bail!(
                "--no-token: {} can be reached from other machines, which could read the runs\nhint: leave --no-token or --listen out",
                address.ip()
            );
        }
        let token = (token == Token::Demanded).then(new_token).transpose()?;
        let cookie = format!("stapo_token_{}", address.port());
        Ok(Self { token, once: Mutex::default(), cookie, is_loopback, host_name })
    }

    /// A token that opens the page once.
    pub fn token_for_once(&self) -> Result<Option<String>> {
        if self.token.is_none() {
            return Ok(None);
        }
        let token = new_token()?;
        self.once().clone_from(&Some(token.clone()));
        Ok(Some(token))
    }

    fn once(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.once.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a token opens the page. A token for one use is used up.
    fn opens(&self, given: &str, token: &str) -> bool {
        let is_once = self.once().take_if(|once| is_same(given, once)).is_some();
        is_once || is_same(given, token)
    }

    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Refuses a request under a foreign name, from a foreign page, or without the token. A request with the right token
    /// in its query is answered by a redirection that sets the cookie, so that the token leaves the address bar.
    pub fn check(&self, request: &Request) -> Result<Option<Response>, Refusal> {
        let host = request.header("host").unwrap_or_default();
        if !self.is_own_name(host) {
            return Err(Refusal::new(
                403,
                format!(
                    "Host {host:?} is not a name of this server: a foreign name may be a DNS rebinding attack"
                ),
            ));
        }
        if request.header("origin").is_some_and(|origin| origin != format!("http://{host}")) {
            return Err(Refusal::new(403, "a request that a page of another origin made"));
        }
        if request.header("sec-fetch-site") == Some("cross-site") && request.path != "/" {
            return Err(Refusal::new(403, "a request that another site made"));
        }
        let Some(token) = &self.token else { return Ok(None) };
        if let Some(given) = request.value("token") {
            if !self.opens(given, token) {
                return Err(Refusal::new(401, "the token is not that of this server"));
            }
            let mut response = Response::new("text/plain; charset=utf-8", "");
            response.status = 303;
            response.headers.push(("Location", "/".into()));
            response.headers.push((
                "Set-Cookie",
                format!("{}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000", self.cookie),
            ));
            return Ok(Some(response));
        }
        match request.cookie(&self.cookie) {
            Some(given) if is_same(given, token) => Ok(None),
            _ => Err(Refusal::new(
                401,
                "no token: open the address that `stapo serve` printed when it started",
            )),
        }
    }

    /// Loopback names and, for a server that other machines reach, every IP address and the machine's name: a DNS rebinding
    /// attack needs a DNS name of the attacker. The port may be that of a tunnel.
    fn is_own_name(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        let address: Option<IpAddr> = bare.parse().ok();
        if name.eq_ignore_ascii_case("localhost") || address.is_some_and(|address| address.is_loopback()) {
            return true;
        }
        !self.is_loopback && (address.is_some() || name.eq_ignore_ascii_case(&self.host_name))
    }
}

/// 128 random bits of the operating system, in hexadecimal.
fn new_token() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("random bits for the token: {error}"))?;
    Ok(stapo_rl::run::disk::hex(&bytes))
}

/// Compares without an early exit: the time reveals neither how much of the token was right nor its length.
fn is_same(given: &str, token: &str) -> bool {
    let (given, token) = (Sha256::digest(given), Sha256::digest(token));
    let difference = given.iter().zip(token.iter()).fold(0, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::super::http::tests::request;
    use super::*;

    fn status(access: &Access, head: &str) -> u16 {
        match access.check(&request(head)) {
            Ok(None) => 200,
            Ok(Some(response)) => response.status,
            Err(refusal) => refusal.status,
        }
    }

    #[test]
    fn loopback_answers_to_its_own_names_only() {
        let access = Access::new(([127, 0, 0, 1], 80).into(), "box".into(), Token::Dropped).unwrap();
        assert_eq!((access.token(), access.token_for_once().unwrap()), (None, None));
        for host in ["localhost", "LocalHost:9", "127.0.0.1:80", "127.9.9.9", "[::1]:80"] {
            assert_eq!(status(&access, &format!("GET / HTTP/1.1\r\nHost: {host}")), 200, "{host}");
        }
        for host in ["evil.example", "evil.example:80", "10.0.0.1", "box", "localhost.evil.example", ""] {
            assert_eq!(status(&access, &format!("GET / HTTP/1.1\r\nHost: {host}")), 403, "{host}");
        }
        assert_eq!(status(&access, "GET / HTTP/1.1"), 403);
        let from =
            |line: &str| status(&access, &format!("GET /api/runs HTTP/1.1\r\nHost: localhost:80\r\n{line}"));
        assert_eq!(from("Origin: http://localhost:80"), 200);
        assert_eq!(from("Origin: http://localhost:81"), 403);
        assert_eq!(from("Origin: null"), 403);
        assert_eq!(from("Sec-Fetch-Site: cross-site"), 403);
        assert_eq!(from("Sec-Fetch-Site: same-origin"), 200);
        let linked = "GET / HTTP/1.1\r\nHost: localhost:80\r\nSec-Fetch-Site: cross-site";
        assert_eq!(status(&access, linked), 200, "a link of another site may lead to the page");
    }

    #[test]
    fn other_users_of_the_machine_need_the_token() {
        let access = Access::new(([127, 0, 0, 1], 7860).into(), "box".into(), Token::Demanded).unwrap();
        let token = access.token().unwrap().to_string();
        let ask = |target: &str, cookie: &str| {
            status(&access, &format!("GET {target} HTTP/1.1\r\nHost: localhost:7860\r\nCookie: {cookie}"))
        };
        assert_eq!((ask("/", ""), ask("/api/runs", ""), ask("/stream", "")), (401, 401, 401));
        assert_eq!(ask(&format!("/?token={token}"), ""), 303);
        assert_eq!(ask("/api/runs", &format!("stapo_token_7860={token}")), 200);
        assert_eq!(ask("/api/runs", &format!("stapo_token_7861={token}")), 401, "that of another server");
        let once = access.token_for_once().unwrap().unwrap();
        assert_ne!(once, token);
        assert_eq!((ask(&format!("/?token={once}"), ""), ask(&format!("/?token={once}"), "")), (303, 401));
        assert_eq!(status(&access, "GET / HTTP/1.1\r\nHost: box:7860"), 403);
    }

    #[test]
    fn other_machines_need_the_token() {
        let everywhere = ([0, 0, 0, 0], 80).into();
        let access = Access::new(everywhere, "box".into(), Token::Demanded).unwrap();
        let token = access.token().unwrap().to_string();
        assert_eq!(token.len(), 32);
        let other = Access::new(everywhere, String::new(), Token::Demanded).unwrap();
        assert_ne!(Some(token.as_str()), other.token());
        let refused = Access::new(everywhere, String::new(), Token::Dropped).unwrap_err().to_string();
        assert!(refused.contains("--no-token: 0.0.0.0 can be reached"), "{refused}");
        let ask = |target: &str, cookie: &str| {
            status(&access, &format!("GET {target} HTTP/1.1\r\nHost: 10.0.0.5:80\r\nCookie: {cookie}"))
        };
        assert_eq!(ask("/", ""), 401);
        assert_eq!(ask("/", "stapo_token_80=0"), 401);
        assert_eq!(ask(&format!("/?token={}", &token[1..]), ""), 401);
        assert_eq!(ask(&format!("/?token={token}"), ""), 303);
        assert_eq!(ask("/api/runs", &format!("a=b; stapo_token_80={token}")), 200);
        let named = |host: &str| {
            status(&access, &format!("GET / HTTP/1.1\r\nHost: {host}\r\nCookie: stapo_token_80={token}"))
        };
        assert_eq!((named("box:80"), named("evil.example")), (200, 403));
    }

    /// The token for one use is worth nothing afterwards, so that the cookie has the other one.
    #[test]
    fn a_token_is_exchanged_for_a_cookie_that_no_script_and_no_other_site_sees() {
        let access = Access::new(([127, 0, 0, 1], 7860).into(), "box".into(), Token::Demanded).unwrap();
        let token = access.token().unwrap().to_string();
        let once = access.token_for_once().unwrap().unwrap();
        for given in [&once, &token] {
            let head = format!("GET /?token={given} HTTP/1.1\r\nHost: localhost:7860");
            let response = access.check(&request(&head)).unwrap().unwrap();
            let cookie =
                format!("stapo_token_7860={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000");
            assert_eq!((response.status, response.body), (303, Vec::new()));
            assert_eq!(response.headers, [("Location", "/".to_string()), ("Set-Cookie", cookie)]);
        }
        // A foreign name and a foreign page are refused before the token is looked at.
        let asked = |lines: &str| status(&access, &format!("GET /?token={token} HTTP/1.1\r\n{lines}"));
        assert_eq!(asked("Host: evil.example"), 403);
        assert_eq!(asked("Host: localhost\r\nOrigin: http://evil.example"), 403);
    }
}

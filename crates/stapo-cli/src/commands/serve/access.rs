//! Who may ask: the names under which the server may be reached, where a request may come from, and the token.

use super::http::{Refusal, Request, Response};
use anyhow::{Result, anyhow};
use sha2::{Digest, Sha256};
use std::net::IpAddr;

const COOKIE: &str = "stapo_token";

/// The rules of one server.
#[derive(Debug)]
pub struct Access {
    /// Absent on loopback, where every process of the machine's users may read what it could read from disk.
    token: Option<String>,
    /// The name of the machine, by which others may reach it.
    host_name: String,
}

impl Access {
    /// The rules for an address: other than loopback ones demand a token.
    pub fn new(address: IpAddr, host_name: String) -> Result<Self> {
        let token = (!address.is_loopback()).then(new_token).transpose()?;
        Ok(Self { token, host_name })
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
            if !is_same(given, token) {
                return Err(Refusal::new(401, "the token is not that of this server"));
            }
            let mut response = Response::new("text/plain; charset=utf-8", "");
            response.status = 303;
            response.headers.push(("Location", "/".into()));
            response.headers.push((
                "Set-Cookie",
                format!("{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"),
            ));
            return Ok(Some(response));
        }
        match request.cookie(COOKIE) {
            Some(given) if is_same(given, token) => Ok(None),
            _ => Err(Refusal::new(
                401,
                "no token: open the address that `stapo serve` printed when it started",
            )),
        }
    }

    /// Loopback names and, where a token protects the server, every IP address and the machine's name: a DNS rebinding
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
        self.token.is_some() && (address.is_some() || name.eq_ignore_ascii_case(&self.host_name))
    }
}

/// 128 random bits of the operating system, in hexadecimal.
fn new_token() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("random bits for the token: {error}"))?;
    Ok(stapo_rl::run::disk::hex(&bytes))
}

/// Compares without an early exit: the time tells nothing about how much of the token was right, nor about its length.
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
        let access = Access::new([127, 0, 0, 1].into(), "box".into()).unwrap();
        assert_eq!(access.token(), None);
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
    }

    #[test]
    fn other_addresses_need_the_token() {
        let access = Access::new([0, 0, 0, 0].into(), "box".into()).unwrap();
        let token = access.token().unwrap().to_string();
        assert_eq!(token.len(), 32);
        assert_ne!(token, Access::new([0, 0, 0, 0].into(), String::new()).unwrap().token().unwrap());
        let ask = |target: &str, cookie: &str| {
            status(&access, &format!("GET {target} HTTP/1.1\r\nHost: 10.0.0.5:80\r\nCookie: {cookie}"))
        };
        assert_eq!(ask("/", ""), 401);
        assert_eq!(ask("/", "stapo_token=0"), 401);
        assert_eq!(ask(&format!("/?token={}", &token[1..]), ""), 401);
        assert_eq!(ask(&format!("/?token={token}"), ""), 303);
        assert_eq!(ask("/api/runs", &format!("a=b; stapo_token={token}")), 200);
        let named = |host: &str| {
            status(&access, &format!("GET / HTTP/1.1\r\nHost: {host}\r\nCookie: stapo_token={token}"))
        };
        assert_eq!((named("box:80"), named("evil.example")), (200, 403));
    }
}

//! Server-sent events: the server tells a page which runs changed, and the page asks for what it shows of them.

use super::http::{Request, head};
use super::site::Site;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

/// A line that says nothing, so that a connection that broke is found.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Sends the changes after the version in `since` until the page leaves.
pub fn serve(site: &Site, request: &Request, stream: &mut TcpStream) {
    let resumed = request.header("last-event-id").and_then(|id| id.parse().ok());
    let mut since: u64 = resumed.or_else(|| request.value("since")?.parse().ok()).unwrap_or(0);
    let _listener = site.listen();
    let begin = head(200, "text/event-stream") + "\r\nretry: 1000\n\n";
    if stream.write_all(begin.as_bytes()).is_err() {
        return;
    }
    loop {
        let news = site.wait(since, HEARTBEAT);
        let text = if news.rows.is_empty() && news.gone.is_empty() {
            ": \n\n".to_string()
        } else {
            let Ok(json) = serde_json::to_string(&news) else { return };
            format!("id: {}\nevent: runs\ndata: {json}\n\n", news.version)
        };
        since = news.version;
        if stream.write_all(text.as_bytes()).and_then(|()| stream.flush()).is_err() {
            return;
        }
    }
}

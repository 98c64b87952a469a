//! What a request names: runs of the list and numbers.

use super::http::{Refusal, Request};
use super::site::Site;
use std::path::PathBuf;
use std::str::FromStr;

/// Runs in one question.
const MAX_RUNS: u64 = 200;

/// The folder of the run that a request names.
pub fn one_run(site: &Site, request: &Request) -> Result<PathBuf, Refusal> {
    folder(site, request.value("run").unwrap_or_default())
}

/// The folders of all runs that a request names, with their ids.
pub fn named_runs(site: &Site, request: &Request) -> Result<Vec<(String, PathBuf)>, Refusal> {
    let ids: Vec<&str> = request.values("run").collect();
    if ids.is_empty() || is_too_much(ids.len() as u64, MAX_RUNS) {
        return Err(Refusal::new(
            400,
            format!("{} runs named, 1 to {MAX_RUNS} are answered at once", ids.len()),
        ));
    }
    ids.into_iter().map(|id| Ok((id.to_string(), folder(site, id)?))).collect()
}

fn folder(site: &Site, id: &str) -> Result<PathBuf, Refusal> {
    site.index().folder(id).ok_or_else(|| Refusal::new(404, format!("run {id:?}: not in the list of runs")))
}

/// Whether a question asks for more than is answered at once.
pub fn is_too_much(n: u64, most: u64) -> bool {
    n > most
}

/// A number of the query, which must be there.
pub fn number<T: FromStr>(request: &Request, name: &str) -> Result<T, Refusal> {
    optional(request, name)?.ok_or_else(|| Refusal::new(400, format!("{name}: missing")))
}

/// A number of the query, or the value that it has without being named.
pub fn number_or<T: FromStr>(request: &Request, name: &str, otherwise: T) -> Result<T, Refusal> {
    Ok(optional(request, name)?.unwrap_or(otherwise))
}

fn optional<T: FromStr>(request: &Request, name: &str) -> Result<Option<T>, Refusal> {
    let bad = |text: &str| Refusal::new(400, format!("{name}: {text:?} is no number"));
    request.value(name).map(|text| text.parse().map_err(|_| bad(text))).transpose()
}

/// An error of reading a run, as the page shows it.
pub fn unreadable(error: &anyhow::Error) -> Refusal {
    Refusal::new(404, format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_as_the_limit_is_answered() {
        assert_eq!([199, 200, 201].map(|n| is_too_much(n, MAX_RUNS)), [false, false, true]);
    }
}

//! Listing and fetching files of the Hugging Face hub.
//!
//! This module uses a plain HTTP client instead of the `hf-hub` crate: `hf-hub` builds cache paths from hashes and file
//! names that the server sends, without checking them, and never compares a file with its hash. The cache on disk has
//! the layout of Python's `huggingface_hub`, so the two share files.

mod fetching;
mod timed;

pub use fetching::{fetch_file, fetch_model, fetch_repository, is_rows};

use crate::shared::units::size as shown_size;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use stapo_rl::policy::hub_cache;
use stapo_rl::run::disk::{hex, open_part, rename, sync_part};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use timed::TimedReader;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

/// A hub with its token and cache.
pub struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    cache: PathBuf,
    timeout: Duration,
}

/// A repository at a revision.
#[derive(Debug, Clone)]
pub struct Repo {
    kind: RepoKind,
    id: String,
    revision: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    Model,
    Dataset,
}

/// The files of a repository at a commit.
#[derive(Debug)]
pub struct Listing {
    pub commit: String,
    pub files: Vec<String>,
}

/// The hash that the hub states for a file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Hash {
    /// SHA-256 of the content, for large files.
    Sha256(String),
    /// git's blob hash (SHA-1 with a header), for small files.
    Git(String),
}

/// Attempts per file; each attempt resumes where the last one broke off.
const TRIES: usize = 5;
/// How long a connection, an answer or the next bytes of a body may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The largest file that is fetched; the largest shards on the hub have 50 GB.
const MAX_FILE_BYTES: u64 = 1 << 40;
/// The largest listing that is read, and the most files of one.
const MAX_LISTING_BYTES: u64 = 16 << 20;
const MAX_FILES: usize = 100_000;

impl Hub {
    /// Reads `HF_ENDPOINT`, `HF_TOKEN` (or the token that `hf auth login` stores), `HF_HUB_CACHE`, `HF_HOME` and
    /// `HF_HUB_DOWNLOAD_TIMEOUT`.
    pub fn from_env() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            bail!("HF_ENDPOINT {endpoint:?}: expected an address that starts with https:// or http://");
        }
        let no_home = "no home folder\nhint: set HF_HOME";
        let home = hub_cache::home().context(no_home)?;
        let timeout = match variable("HF_HUB_DOWNLOAD_TIMEOUT").map(|text| (text.parse::<u64>(), text)) {
            None => TIMEOUT,
            Some((Ok(seconds @ 1..=86400), _)) => Duration::from_secs(seconds),
            Some((_, text)) => bail!("HF_HUB_DOWNLOAD_TIMEOUT {text:?}: expected seconds, 1 to 86400"),
        };
        let kept = || fs::read_to_string(home.join("token")).ok().map(|token| token.trim().to_string());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_resolve(Some(timeout))
            .timeout_connect(Some(timeout))
            .timeout_send_request(Some(timeout))
            .timeout_recv_response(Some(timeout))
            .build();
        Ok(Self {
            agent: config.into(),
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: variable("HF_TOKEN").or_else(kept).filter(|token| !token.is_empty()),
            cache: hub_cache::cache().context(no_home)?,
            timeout,
        })
    }

    /// The files of a repository.
    pub fn list(&self, repo: &Repo) -> Result<Listing> {
        #[derive(Deserialize)]
        struct RepoInfo {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let revision = encoded(&repo.revision).replace('/', "%2F");
        let url = format!("{}/api/{}/{}/revision/{revision}", self.endpoint, repo.kind.plural(), repo.id);
        let response = self.get(&url, None)?;
        self.check(&repo.id, response.status())?;
        let at = || format!("{}: the hub's list of files", repo.id);
        let mut text = Vec::new();
        let body = TimedReader::new(response.into_body().into_reader(), self.timeout);
        body.take(MAX_LISTING_BYTES + 1).read_to_end(&mut text).with_context(at)?;
        if text.len() as u64 > MAX_LISTING_BYTES {
            bail!("{}: more than {}", at(), shown_size(MAX_LISTING_BYTES));
        }
        let info: RepoInfo = serde_json::from_slice(&text).with_context(at)?;
        if info.siblings.len() > MAX_FILES {
            bail!("{}: {} files, at most {MAX_FILES}", at(), info.siblings.len());
        }
        if !hub_cache::is_commit(&info.sha) {
            bail!("{}: the hub names the commit {:?}, expected 40 hexadecimal digits", repo.id, info.sha);
        }
        Ok(Listing {
            commit: info.sha,
            files: info.siblings.into_iter().map(|file| file.rfilename).collect(),
        })
    }

    /// A file's path in the cache; the file is fetched if it is missing. `progress` gets (bytes so far, bytes in all).
    pub fn fetch(
        &self,
        repo: &Repo,
        commit: &str,
        file: &str,
        progress: &dyn Fn(u64, u64),
    ) -> Result<PathBuf> {
        let source = format!("{} {file}", repo.id);
        let is_inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
        if !is_inside || file.is_empty() || file.contains(['\0', '\\']) {
            bail!("{source}: the hub names a file outside its repository");
        }
        let root = self.cache.join(repo.folder());
        let pointer = root.join("snapshots").join(commit).join(file);
        if pointer.is_file() {
            return Ok(pointer);
        }
        let url =
            format!("{}/{}{}/resolve/{commit}/{}", self.endpoint, repo.kind.prefix(), repo.id, encoded(file));
        let (hash, size) = self.ask(&source, &url)?;
        if size > MAX_FILE_BYTES {
            bail!(
                "{source}: the hub names {}, at most {} are fetched",
                shown_size(size),
                shown_size(MAX_FILE_BYTES)
            );
        }
        let blob = root.join("blobs").join(hash.digits());
        if !blob.is_file() {
            fs::create_dir_all(root.join("blobs")).with_context(|| root.display().to_string())?;
            let partial = blob.with_extension("incomplete");
            self.download(&source, &url, &partial, size, progress)?;
            if hash.of_file(&partial)? != hash {
                fs::remove_file(&partial).with_context(|| partial.display().to_string())?;
                bail!(
                    "{source}: its content does not have the hash the hub names, {}; it was deleted\nhint: fetch it again",
                    hash.digits()
                );
            }
            // A blob is trusted by its name, so its content is on the disk before it has the name.
            sync_part(&open_part(&partial)?, &partial)?;
            rename(&partial, &blob)?;
        }
        link(&blob, &pointer)?;
        if repo.revision != commit {
            let reference = root.join("refs").join(&repo.revision);
            fs::create_dir_all(reference.parent().unwrap_or(&root))
                .with_context(|| root.display().to_string())?;
            fs::write(&reference, commit).with_context(|| reference.display().to_string())?;
        }
        Ok(pointer)
    }

    /// Hash and size of a file.
    fn ask(&self, place: &str, url: &str) -> Result<(Hash, u64)> {
        let request = self.agent.head(url).config().max_redirects(0).max_redirects_will_error(false).build();
        let request = match &self.token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        };
        let response = request.call().map_err(|error| self.unreachable(&error))?;
        if !response.status().is_redirection() {
            self.check(place, response.status())?;
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let tag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
        let digits = tag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let hash = match digits.len() {
            64 if is_hex(&digits, 64) => Hash::Sha256(digits),
            40 if is_hex(&digits, 40) => Hash::Git(digits),
            _ => bail!("{place}: the hub names no hash for it ({tag:?})"),
        };
        let size =
            header("x-linked-size").or_else(|| header("content-length")).and_then(|text| text.parse().ok());
        Ok((hash, size.with_context(|| format!("{place}: the hub names no size for it"))?))
    }

    /// Downloads the rest of `partial` until it has `size` bytes.
    fn download(
        &self,
        place: &str,
        url: &str,
        partial: &Path,
        size: u64,
        progress: &dyn Fn(u64, u64),
    ) -> Result<()> {
        let mut last = None;
        for _ in 0..TRIES {
            let start = fs::metadata(partial).map_or(0, |file| file.len());
            if start > size {
                fs::remove_file(partial).with_context(|| partial.display().to_string())?;
                continue;
            }
            if start == size && size > 0 {
                return Ok(());
            }
            match self.download_from(place, url, partial, start, size, progress)? {
                None => return Ok(()),
                Some(broken) => last = Some(broken),
            }
        }
        let have = fs::metadata(partial).map_or(0, |file| file.len());
        let why = last.map_or(String::new(), |error| format!(": {error}"));
        bail!(
            "{place}: broke off after {} of {}{why}\nhint: run the same command again to continue",
            shown_size(have),
            shown_size(size)
        )
    }

    /// One attempt. `Some` is a broken transfer that can be resumed; `Err` is an error that cannot.
    fn download_from(
        &self,
        place: &str,
        url: &str,
        partial: &Path,
        start: u64,
        size: u64,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Option<std::io::Error>> {
        let response = self.get(url, Some(start).filter(|start| *start > 0))?;
        self.check(place, response.status())?;
        let goes_on = response.status() == StatusCode::PARTIAL_CONTENT;
        let at = |e: std::io::Error| anyhow::Error::new(e).context(partial.display().to_string());
        let mut file = OpenOptions::new().create(true).append(true).open(partial).map_err(at)?;
        let mut have = if goes_on { start } else { 0 };
        file.set_len(have).map_err(at)?;
        let mut body = TimedReader::new(response.into_body().into_reader(), self.timeout);
        let mut buffer = vec![0; 1 << 16];
        loop {
            match body.read(&mut buffer) {
                Ok(0) if have < size => return Ok(Some(std::io::ErrorKind::UnexpectedEof.into())),
                Ok(0) => return Ok(None),
                Ok(n) if n as u64 > size - have => {
                    bail!(
                        "{place}: longer than the {} the hub names\nhint: fetch it again",
                        shown_size(size)
                    );
                }
                Ok(n) => {
                    file.write_all(&buffer[..n]).map_err(at)?;
                    have += n as u64;
                    progress(have, size);
                }
                Err(error) => return Ok(Some(error)),
            }
        }
    }

    fn get(&self, url: &str, start: Option<u64>) -> Result<Response<Body>> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(start) = start {
            request = request.header("Range", format!("bytes={start}-"));
        }
        request.call().map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &ureq::Error) -> anyhow::Error {
        anyhow::anyhow!(
            "{}: cannot be reached: {error}\nhint: check the network, or name a mirror in HF_ENDPOINT; files you have work without it (--model DIR, --data DIR)",
            self.endpoint
        )
    }

    /// Turns an HTTP status into an error with a hint.
    fn check(&self, place: &str, status: StatusCode) -> Result<()> {
        let has_token =
            if self.token.is_some() { "the token in HF_TOKEN is not accepted" } else { "no token was given" };
        match status.as_u16() {
            200..=299 => Ok(()),
            401 => bail!(
                "{place}: the hub asks who you are ({has_token}), or there is no such repository\nhint: check the name, and set HF_TOKEN to a token of yours"
            ),
            403 => bail!(
                "{place}: access refused\nhint: accept its terms on the hub with the account of your HF_TOKEN"
            ),
            404 => bail!("{place}: not found on {}\nhint: check the name and the revision", self.endpoint),
            code => bail!("{place}: the hub answers {code}\nhint: try again later"),
        }
    }
}

impl Repo {
    /// A repository whose name and revision have the right form; the network is not asked.
    pub fn new(kind: RepoKind, id: &str, revision: &str) -> Result<Self> {
        if !hub_cache::is_repository(id) {
            bail!(
                "repository {id:?}: expected OWNER/NAME, such as {}",
                match kind {
                    RepoKind::Model => "Qwen/Qwen3-0.6B",
                    RepoKind::Dataset => "openai/gsm8k",
                }
            );
        }
        if !hub_cache::is_revision(revision) {
            bail!("--revision {revision:?}: expected a branch, a tag or a commit, such as main or refs/pr/1");
        }
        Ok(Self { kind, id: id.to_string(), revision: revision.to_string() })
    }

    /// The repository's folder in the cache.
    fn folder(&self) -> String {
        format!("{}--{}", self.kind.plural(), self.id.replace('/', "--"))
    }
}

impl RepoKind {
    fn plural(self) -> &'static str {
        match self {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }

    fn prefix(self) -> &'static str {
        match self {
            RepoKind::Model => "",
            RepoKind::Dataset => "datasets/",
        }
    }
}

impl Hash {
    fn digits(&self) -> &str {
        match self {
            Hash::Sha256(digits) | Hash::Git(digits) => digits,
        }
    }

    /// The hash of a file, of the same kind as `self`.
    fn of_file(&self, path: &Path) -> Result<Self> {
        let at = || path.display().to_string();
        let mut file = File::open(path).with_context(at)?;
        Ok(match self {
            Hash::Sha256(_) => {
                let mut hash = Sha256::new();
                std::io::copy(&mut file, &mut hash).with_context(at)?;
                Hash::Sha256(hex(&hash.finalize()))
            }
            Hash::Git(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {}\0", file.metadata().with_context(at)?.len()));
                std::io::copy(&mut file, &mut hash).with_context(at)?;
                Hash::Git(hex(&hash.finalize()))
            }
        })
    }
}

/// A path of a URL, with every byte that has a special meaning there written as `%20`.
fn encoded(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            for digit in [byte >> 4, byte & 15] {
                out.extend(char::from_digit(digit.into(), 16).map(|digit| digit.to_ascii_uppercase()));
            }
        }
    }
    out
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Links the blob into a snapshot folder with a relative symbolic link; copies it on systems without links.
fn link(blob: &Path, pointer: &Path) -> Result<()> {
    let folder = pointer.parent().context("a file in a snapshot has a folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let _ = fs::remove_file(pointer);
    #[cfg(unix)]
    {
        let root = blob.parent().and_then(Path::parent).context("a blob has a repository")?;
        let depth = folder.strip_prefix(root).map_or(0, |inner| inner.components().count());
        let up: PathBuf = std::iter::repeat_n("..", depth).collect();
        let target = up.join("blobs").join(blob.file_name().unwrap_or_default());
        std::os::unix::fs::symlink(target, pointer).with_context(|| pointer.display().to_string())
    }
    #[cfg(not(unix))]
    fs::copy(blob, pointer).map(drop).with_context(|| pointer.display().to_string())
}

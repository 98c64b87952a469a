//! What all connections share: the list of runs with its versions, and the columns of the runs that were looked at.

use super::index::{Changes, Index, Look, Row};
use super::lines::Tail;
use stapo_rl::run::columns::Columns;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often runs that may be growing are looked at while a page listens. Lengths and times are asked for instead of
/// being notified: that works on network file systems and in copied folders alike, and costs milliseconds.
const EVERY: Duration = Duration::from_millis(500);
/// How often every run is looked at.
const EVERYTHING_EVERY: Duration = Duration::from_secs(2);
/// A look may take one part in so many of the time; on a slow file system looks become rarer.
const MAX_SHARE: u32 = 10;
/// Columns kept in memory, of the runs that were looked at last.
const MAX_CACHE_BYTES: usize = 256 << 20;

pub struct Site {
    index: Mutex<Index>,
    board: Mutex<Board>,
    changed: Condvar,
    n_listeners: AtomicUsize,
    columns: Mutex<BTreeMap<String, Arc<Mutex<OpenRun>>>>,
}

/// The version of every row; a new version is higher than all before.
#[derive(Debug)]
struct Board {
    version: u64,
    rows: BTreeMap<String, (u64, Option<Row>)>,
}

/// The metrics of a run in memory.
pub struct OpenRun {
    tail: Tail,
    pub columns: Columns,
    /// Rises when the file begins again, so that a page knows to ask for everything.
    pub generation: u64,
    used: Instant,
}

/// What changed after a version: rows, and ids without a run.
#[derive(Debug, serde::Serialize)]
pub struct News {
    pub version: u64,
    pub rows: Vec<Row>,
    pub gone: Vec<String>,
}

impl Site {
    pub fn new(root: &Path, host: String) -> Self {
        // Versions begin at the time of the start, so that a page of an earlier server takes everything as new.
        let begin = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Self {
            index: Mutex::new(Index::new(root, host)),
            board: Mutex::new(Board { version: begin, rows: BTreeMap::new() }),
            changed: Condvar::new(),
            n_listeners: AtomicUsize::new(0),
            columns: Mutex::default(),
        }
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }

    /// Looks at runs and sends the listeners what changed.
    pub fn refresh(&self, look: Look) {
        let mut index = self.index();
        let Changes { rows, gone } = index.refresh(look);
        if rows.is_empty() && gone.is_empty() {
            return;
        }
        let mut board = lock(&self.board);
        board.version += 1;
        let version = board.version;
        for row in rows {
            board.rows.insert(row.id.clone(), (version, Some(row)));
        }
        for id in gone {
            board.rows.insert(id, (version, None));
        }
        drop((board, index));
        self.changed.notify_all();
    }

    /// Looks at the folder for as long as the process lives, while a page listens.
    pub fn watch(&self) {
        let mut next_whole = Instant::now();
        loop {
            let began = Instant::now();
            let is_whole = began >= next_whole;
            if self.n_listeners() > 0 {
                self.refresh(if is_whole { Look::Everything } else { Look::Active });
            }
            let took = began.elapsed();
            if is_whole {
                next_whole = began + EVERYTHING_EVERY.max(took * MAX_SHARE);
            }
            let is_slow_look = !is_whole && took > EVERY / MAX_SHARE;
            std::thread::sleep(if is_slow_look { took * MAX_SHARE } else { EVERY });
        }
    }

    /// All rows with a version above `since`.
    pub fn news(&self, since: u64) -> News {
        news(&lock(&self.board), since)
    }

    /// Waits until something is newer than `since`, at most for `patience`.
    pub fn wait(&self, since: u64, patience: Duration) -> News {
        let board = lock(&self.board);
        let waited = self.changed.wait_timeout_while(board, patience, |board| board.version <= since);
        let (board, _) = waited.unwrap_or_else(PoisonError::into_inner);
        news(&board, since)
    }

    /// Counts a listener for as long as the value lives.
    pub fn listen(&self) -> Listener<'_> {
        self.n_listeners.fetch_add(1, Ordering::SeqCst);
        Listener(self)
    }

    pub fn n_listeners(&self) -> usize {
        self.n_listeners.load(Ordering::SeqCst)
    }

    /// The metrics of a run up to its last whole line; `None` for an id that is no run.
    pub fn open(&self, id: &str) -> Option<Arc<Mutex<OpenRun>>> {
        let folder = self.index().folder(id)?;
        let fresh = || OpenRun {
            tail: Tail::new(&folder.join("metrics.jsonl")),
            columns: Columns::default(),
            generation: 0,
            used: Instant::now(),
        };
        let run = Arc::clone(
            lock(&self.columns).entry(id.to_string()).or_insert_with(|| Arc::new(Mutex::new(fresh()))),
        );
        lock(&run).read();
        self.forget_unused(MAX_CACHE_BYTES);
        Some(run)
    }

    /// Drops the least recently requested runs until the rest fits into `max_bytes`; never the newest one.
    fn forget_unused(&self, max_bytes: usize) {
        let mut open = lock(&self.columns);
        let mut sizes: Vec<(Instant, usize, String)> = open
            .iter()
            .filter_map(|(id, run)| {
                let run = run.try_lock().ok()?;
                Some((run.used, run.columns.n_bytes(), id.clone()))
            })
            .collect();
        sizes.sort();
        let mut total: usize = sizes.iter().map(|(_, n_bytes, _)| n_bytes).sum();
        sizes.pop();
        for (_, n_bytes, id) in sizes {
            if total <= max_bytes {
                break;
            }
            open.remove(&id);
            total -= n_bytes;
        }
    }
}

impl OpenRun {
    fn read(&mut self) {
        self.used = Instant::now();
        let read = self.tail.read(&mut self.columns, Columns::clear, Columns::add);
        match read {
            Ok(found) => self.generation += u64::from(found.is_new),
            Err(error) => self.columns.problem = Some(format!("metrics.jsonl: {error}")),
        }
    }
}

fn news(board: &Board, since: u64) -> News {
    let newer = || board.rows.iter().filter(|(_, (version, _))| *version > since);
    News {
        version: board.version,
        rows: newer().filter_map(|(_, (_, row))| row.clone()).collect(),
        gone: newer().filter(|(_, (_, row))| row.is_none()).map(|(id, _)| id.clone()).collect(),
    }
}

/// A page that receives changes.
pub struct Listener<'a>(&'a Site);

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.0.n_listeners.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread that panicked while it held the lock leaves values that are whole: every change is a single assignment.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn site(root: &Path, runs: &[&str]) -> Site {
        for run in runs {
            add_run(root, run);
        }
        let site = Site::new(root, "here".into());
        site.refresh(Look::Everything);
        site
    }

    fn add_run(root: &Path, name: &str) {
        fs::create_dir_all(root.join(name)).unwrap();
        fs::write(root.join(name).join("plan.toml"), "steps = 2\n").unwrap();
        fs::write(root.join(name).join("metrics.jsonl"), "{\"step\": 1, \"loss\": 2.0}\n").unwrap();
    }

    fn ids(news: &News) -> (Vec<&str>, Vec<&str>) {
        let rows = news.rows.iter().map(|row| row.id.as_str());
        (rows.collect(), news.gone.iter().map(String::as_str).collect())
    }

    #[test]
    fn a_page_learns_what_is_newer_than_what_it_knows() {
        let folder = tempfile::tempdir().unwrap();
        let site = site(folder.path(), &["a", "b"]);
        let first = site.news(0);
        assert_eq!(ids(&first), (vec!["a", "b"], vec![]));
        // Versions count on from the clock, so that a page of an earlier server takes everything as new.
        assert!(first.version > 1_700_000_000_000, "{}", first.version);
        site.refresh(Look::Everything);
        assert_eq!(site.news(0).version, first.version, "nothing has changed");
        assert_eq!(ids(&site.news(first.version)), (vec![], vec![]));
        fs::remove_dir_all(folder.path().join("a")).unwrap();
        add_run(folder.path(), "c");
        site.refresh(Look::Everything);
        let second = site.wait(first.version, Duration::ZERO);
        assert_eq!((second.version, ids(&second)), (first.version + 1, (vec!["c"], vec!["a"])));
        assert_eq!(ids(&site.news(0)), (vec!["b", "c"], vec!["a"]));
    }

    /// A run that goes on from an earlier checkpoint may have a shorter file.
    #[test]
    fn metrics_that_begin_again_are_read_anew() {
        let folder = tempfile::tempdir().unwrap();
        let site = site(folder.path(), &["a"]);
        let read = || {
            let open = site.open("a").unwrap();
            let open = lock(&open);
            (open.generation, open.columns.steps().to_vec())
        };
        assert_eq!(read(), (0, vec![1.0]));
        fs::write(folder.path().join("a/metrics.jsonl"), "").unwrap();
        assert_eq!(read(), (1, vec![]));
    }

    #[test]
    fn a_listener_counts_while_it_listens() {
        let folder = tempfile::tempdir().unwrap();
        let site = site(folder.path(), &[]);
        let listeners = [site.listen(), site.listen()];
        assert_eq!(site.n_listeners(), 2);
        drop(listeners);
        assert_eq!(site.n_listeners(), 0);
    }

    #[test]
    fn the_run_that_was_looked_at_least_lately_is_forgotten_first() {
        let folder = tempfile::tempdir().unwrap();
        let site = site(folder.path(), &["a", "b", "c"]);
        let n_bytes = |id: &str| lock(&site.open(id).unwrap()).columns.n_bytes();
        let total: usize = ["a", "b", "c"].map(n_bytes).iter().sum();
        let kept = |max_bytes: usize| {
            site.forget_unused(max_bytes);
            lock(&site.columns).keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(kept(total), ["a", "b", "c"]);
        n_bytes("a");
        assert_eq!(kept(total - 1), ["a", "c"]);
        assert_eq!(kept(0), ["a"], "the newest stays");
        assert!(site.open("nowhere").is_none());
    }
}

//! Signs of life between rank 0 and every other rank, and the one error that all of them end with. A rank that dies, hangs
//! or loses its network stops all ranks within seconds.

use super::wire::{Packer, Unpacker};
use stapo_model::ranks::RankError;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How often a rank gives a sign of life, and after how long a silence it counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    pub beat: Duration,
    pub silence: Duration,
}

/// The variable with the seconds of silence after which a rank counts as lost.
const SILENCE: &str = "STAPO_RANKS_TIMEOUT";

impl Pace {
    /// Ten seconds, unless the environment says otherwise.
    pub fn from_env() -> Self {
        let given = std::env::var(SILENCE).ok().and_then(|text| text.parse::<f64>().ok());
        let seconds = given.filter(|seconds| (0.1..=86_400.0).contains(seconds)).unwrap_or(10.0);
        Pace { beat: Duration::from_secs_f64(seconds / 10.0), silence: Duration::from_secs_f64(seconds) }
    }
}

/// A rank that lost a connection waits so long for word from rank 0 about which rank is gone.
const VERDICT: Duration = Duration::from_secs(3);
/// A connection between two ranks that both live may be at fault; so long rank 0 waits for one of them to end.
const GRACE: Duration = Duration::from_secs(1);
/// The longest wait for the others at the end.
const FAREWELL: Duration = Duration::from_secs(10);
/// The longest wait, after a failure, until the others have read it.
const LAST_WORD: Duration = Duration::from_secs(3);

/// Messages between rank 0 and another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Message {
    Beat,
    /// A rank cannot continue.
    Failed(RankError),
    /// The connection to this rank broke.
    Lost(usize),
    /// The sender has ended as planned.
    Bye,
}

/// The longest message; texts of errors are cut.
const MAX_TEXT: usize = 1 << 16;

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut packer = Packer::default();
        match self {
            Message::Beat => packer.byte(0),
            Message::Failed(error) => {
                packer.byte(1);
                packer.number(error.rank);
                let end = (0..=error.problem.len().min(MAX_TEXT / 2))
                    .rev()
                    .find(|&at| error.problem.is_char_boundary(at));
                packer.text(&error.problem[..end.unwrap_or(0)]);
            }
            Message::Lost(rank) => {
                packer.byte(2);
                packer.number(*rank);
            }
            Message::Bye => packer.byte(3),
        }
        let mut framed = (packer.0.len() as u32).to_le_bytes().to_vec();
        framed.extend(packer.0);
        framed
    }

    fn read(stream: &mut impl Read) -> io::Result<Self> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "a message that this program does not know");
        let mut len = [0; 4];
        stream.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_TEXT {
            return Err(bad());
        }
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes)?;
        let mut read = Unpacker(&bytes);
        let mut message = || {
            Ok::<_, super::wire::Malformed>(match read.byte()? {
                0 => Some(Message::Beat),
                1 => Some(Message::Failed(RankError { rank: read.number()?, problem: read.text()? })),
                2 => Some(Message::Lost(read.number()?)),
                3 => Some(Message::Bye),
                _ => None,
            })
        };
        message().ok().flatten().ok_or_else(bad)
    }
}

/// The control connections of one rank: rank 0 has one to every other rank, the others have one to rank 0.
pub struct Control {
    rank: usize,
    links: Vec<Link>,
    /// Connections that are shut when a rank fails, so that no rank waits for data any more.
    data: Vec<TcpStream>,
    state: Mutex<State>,
    changed: Condvar,
    pace: Pace,
    /// Called where a rank fails.
    then: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A control connection.
struct Link {
    peer: usize,
    stream: TcpStream,
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// An error is on its way to be the one that all end with.
    is_decided: bool,
    failure: Option<RankError>,
    /// Ranks that sent their goodbye.
    n_gone: usize,
    /// Control connections that the other side has closed.
    n_closed: usize,
    /// This rank has sent its goodbye.
    is_leaving: bool,
}

impl Control {
    /// Begins to give signs of life and to watch for those of others.
    pub fn start(
        rank: usize,
        links: Vec<(usize, TcpStream)>,
        data: Vec<TcpStream>,
        pace: Pace,
    ) -> io::Result<Arc<Self>> {
        let links = links.into_iter().map(|(peer, stream)| Link { peer, stream, writing: Mutex::default() });
        let control = Arc::new(Control {
            rank,
            links: links.collect(),
            data,
            state: Mutex::default(),
            changed: Condvar::new(),
            pace,
            then: OnceLock::new(),
        });
        for idx in 0..control.links.len() {
            let watched = Arc::clone(&control);
            let mut stream = control.links[idx].stream.try_clone()?;
            stream.set_read_timeout(Some(pace.silence))?;
            stream.set_write_timeout(Some(pace.silence))?;
            let name = format!("rank {}", control.links[idx].peer);
            std::thread::Builder::new().name(name).spawn(move || watched.watch(idx, &mut stream))?;
        }
        let beating = Arc::clone(&control);
        std::thread::Builder::new().name("signs of life".into()).spawn(move || beating.beat())?;
        Ok(control)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(link: &Link, message: &Message) {
        let _one_at_a_time = link.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // A connection that is gone is noticed by the thread that reads from it.
        let _ = (&link.stream).write_all(&message.to_bytes());
    }

    fn send_all(&self, message: &Message) {
        self.links.iter().for_each(|link| Self::send(link, message));
    }

    fn beat(&self) {
        loop {
            let state = self.state();
            let (state, _) = self
                .changed
                .wait_timeout_while(state, self.pace.beat, |state| {
                    state.failure.is_none() && !state.is_leaving
                })
                .unwrap_or_else(PoisonError::into_inner);
            if state.failure.is_some() || state.is_leaving {
                return;
            }
            drop(state);
            self.send_all(&Message::Beat);
        }
    }

    /// Reads what the other side of a link sends until it closes the connection or is lost.
    fn watch(&self, idx: usize, stream: &mut TcpStream) {
        let peer = self.links[idx].peer;
        loop {
            match Message::read(stream) {
                Ok(Message::Beat) => {}
                Ok(Message::Failed(error)) => self.conclude(error),
                Ok(Message::Lost(other)) => {
                    self.wait(GRACE, |state| state.failure.is_some());
                    let problem = format!("lost its connection to rank {other}");
                    self.conclude(RankError { rank: peer, problem });
                }
                Ok(Message::Bye) => {
                    self.state().n_gone += 1;
                    self.changed.notify_all();
                    return;
                }
                Err(error) => {
                    let problem = if is_timeout(&error) {
                        let seconds = self.pace.silence.as_secs_f64();
                        format!("gave no sign of life for {seconds} s; it hangs, or its network is cut")
                    } else {
                        "its process has ended, or its connection was cut".to_string()
                    };
                    self.conclude(RankError { rank: peer, problem });
                    self.state().n_closed += 1;
                    self.changed.notify_all();
                    return;
                }
            }
        }
    }

    /// Makes an error the one that this rank, and where this is rank 0 every rank, ends with; the first one counts. The
    /// error can be seen once the others have been informed: a rank that sees it may leave at once.
    fn conclude(&self, error: RankError) {
        let mut state = self.state();
        if state.is_decided {
            drop(state);
            return self.wait(VERDICT, |state| state.failure.is_some());
        }
        state.is_decided = true;
        drop(state);
        if self.rank == 0 {
            self.send_all(&Message::Failed(error.clone()));
        }
        self.state().failure = Some(error);
        self.changed.notify_all();
        for stream in &self.data {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(then) = self.then.get() {
            then();
        }
    }

    /// Calls `then` where a rank fails; only the first one given is called.
    pub fn on_failure(&self, then: impl Fn() + Send + Sync + 'static) {
        let _ = self.then.set(Box::new(then));
    }

    fn wait(&self, longest: Duration, is_enough: impl Fn(&State) -> bool) {
        let waiting = self.changed.wait_timeout_while(self.state(), longest, |state| !is_enough(state));
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }

    /// What this rank ends with.
    pub fn failure(&self) -> Option<RankError> {
        self.state().failure.clone()
    }

    /// Tells all ranks that this one cannot continue. Returns what all end with.
    pub fn fail(&self, problem: &str) -> RankError {
        let failure = RankError { rank: self.rank, problem: problem.to_string() };
        if self.rank == 0 {
            self.conclude(failure.clone());
        } else if self.failure().is_none() {
            self.send_all(&Message::Failed(failure.clone()));
            self.wait(VERDICT, |state| state.failure.is_some());
            self.conclude(failure.clone());
        }
        self.failure().unwrap_or(failure)
    }

    /// The connection to a rank broke while data went over it. Returns what all ranks end with.
    pub fn lost(&self, peer: usize) -> RankError {
        let broken = RankError { rank: peer, problem: "its connection was cut".to_string() };
        if self.rank == 0 {
            self.wait(GRACE, |state| state.failure.is_some());
        } else if self.failure().is_none() {
            self.send_all(&Message::Lost(peer));
            self.wait(VERDICT, |state| state.failure.is_some());
        }
        self.conclude(broken.clone());
        self.failure().unwrap_or(broken)
    }

    /// Says goodbye, and waits until the others have done so. After a failure, waits until the others have closed their
    /// connections: a process that ends with unread messages resets its connections, and its last message would be lost.
    pub fn leave(&self) {
        self.state().is_leaving = true;
        self.changed.notify_all();
        let n_links = self.links.len();
        if self.failure().is_none() {
            self.send_all(&Message::Bye);
            self.wait(FAREWELL, |state| state.failure.is_some() || state.n_gone == n_links);
        }
        if self.failure().is_some() {
            for link in &self.links {
                let _ = link.stream.shutdown(Shutdown::Write);
            }
            self.wait(LAST_WORD, |state| state.n_closed + state.n_gone == n_links);
        }
        for link in &self.links {
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_long_words_are_cut_between_characters() {
        let sent = |message: &Message| Message::read(&mut &message.to_bytes()[..]);
        let failed = |problem: String| Message::Failed(RankError { rank: 3, problem });
        for message in [Message::Beat, failed("the GPU is gone".into()), Message::Lost(7), Message::Bye] {
            assert_eq!(sent(&message).unwrap(), message);
        }
        // A character of three bytes lies across the limit.
        let long = "x".repeat(MAX_TEXT / 2 - 1) + &"€".repeat(1000);
        let Message::Failed(error) = sent(&failed(long)).unwrap() else { panic!("another message") };
        assert_eq!((error.rank, error.problem), (3, "x".repeat(MAX_TEXT / 2 - 1)));
        let framed = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
        for torn in [framed(&[4]), framed(&[]), framed(&[2, 0]), vec![1, 0], framed(&vec![0; MAX_TEXT + 1])] {
            assert!(Message::read(&mut &torn[..]).is_err(), "{} bytes", torn.len());
        }
    }
}

//! Ranks that are connected by TCP, each with every other. Numbers on a GPU go through the host.

use super::control::{Control, Pace};
use super::environment::Membership;
use super::rendezvous::{Connections, meet};
use stapo_model::ranks::{RankError, Transport};
use stapo_model::{Device, Stored, View, ViewMut};
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The transport between processes, on one machine or several.
pub struct Tcp {
    rank: usize,
    /// By rank; `None` for this one.
    peers: Vec<Option<Peer>>,
    control: Arc<Control>,
    waited_nanos: AtomicU64,
}

/// The connection to another rank. A thread writes, so that two ranks that send to each other do not both wait for the
/// other to read.
struct Peer {
    outgoing: Mutex<Option<mpsc::Sender<Vec<u8>>>>,
    incoming: Mutex<BufReader<TcpStream>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What one read asks the system for.
const READ_AT_ONCE: usize = 1 << 18;
/// Memory that is asked for before a message has arrived, at most.
const ASKED_FOR: u64 = 1 << 30;
/// A longer message is a defect or an attack, and is refused before memory is asked for.
const MAX_MESSAGE: u64 = 1 << 40;

impl Peer {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let mut to = stream.try_clone()?;
        let (outgoing, messages) = mpsc::channel::<Vec<u8>>();
        // A connection that is gone is noticed by whoever reads from it.
        let write = move || {
            for message in messages {
                let sent =
                    to.write_all(&(message.len() as u64).to_le_bytes()).and_then(|()| to.write_all(&message));
                if sent.is_err() {
                    return;
                }
            }
        };
        let writer = std::thread::Builder::new().name("sending".into()).spawn(write)?;
        Ok(Self {
            outgoing: Mutex::new(Some(outgoing)),
            incoming: Mutex::new(BufReader::with_capacity(READ_AT_ONCE, stream)),
            writer: Mutex::new(Some(writer)),
        })
    }

    fn send(&self, message: Vec<u8>) {
        let outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        // Where the writer has ended, the connection is gone, which is noticed by whoever reads from it.
        let _ = outgoing.as_ref().map(|outgoing| outgoing.send(message));
    }

    /// The next message. One of another length than `expected` is refused.
    fn receive(&self, expected: Option<usize>) -> io::Result<Vec<u8>> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let mut len = [0; 8];
        incoming.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > MAX_MESSAGE || expected.is_some_and(|expected| expected as u64 != len) {
            let wanted = expected.unwrap_or(0);
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("sent {len} bytes, expected {wanted}"),
            ));
        }
        if expected.is_some() {
            let mut message = vec![0; len as usize];
            incoming.read_exact(&mut message)?;
            return Ok(message);
        }
        // The system gives memory as it is written to; beyond this the memory grows with what arrives.
        let mut message = Vec::with_capacity(len.min(ASKED_FOR) as usize);
        incoming.by_ref().take(len).read_to_end(&mut message)?;
        if (message.len() as u64) < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(message)
    }

    /// Waits until all messages are with the system.
    fn flush(&self) {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner).take();
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = writer.map(JoinHandle::join);
    }
}

impl Tcp {
    /// Meets the other ranks of the run. `report` gets what the user should know before all have met.
    pub fn connect(membership: &Membership, report: &dyn Fn(&str)) -> Result<Arc<Self>, RankError> {
        let fault = |error: io::Error| RankError { rank: membership.rank, problem: error.to_string() };
        let Connections { control, data } = meet(membership, report)?;
        let shut =
            data.iter().flatten().map(TcpStream::try_clone).collect::<io::Result<_>>().map_err(fault)?;
        let control = Control::start(membership.rank, control, shut, Pace::from_env()).map_err(fault)?;
        let peers = data.into_iter().map(|stream| stream.map(Peer::new).transpose());
        Ok(Arc::new(Tcp {
            rank: membership.rank,
            peers: peers.collect::<io::Result<_>>().map_err(fault)?,
            control,
            waited_nanos: AtomicU64::new(0),
        }))
    }

    /// What all ranks end with, once one has failed.
    pub(super) fn failure(&self) -> Option<RankError> {
        self.control.failure()
    }

    /// Calls `then` where a rank fails.
    pub(super) fn on_failure(&self, then: impl Fn() + Send + Sync + 'static) {
        self.control.on_failure(then);
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    fn peer(&self, rank: usize) -> &Peer {
        self.peers[rank].as_ref().expect("a rank does not send to itself")
    }

    fn receive_of(&self, rank: usize, expected: Option<usize>) -> Result<Vec<u8>, RankError> {
        let began = Instant::now();
        let received = self.peer(rank).receive(expected);
        self.waited_nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        received.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => self.control.fail(&format!("rank {rank} {error}")),
            _ => self.control.lost(rank),
        })
    }

    /// Refuses to continue where a rank has failed.
    fn check(&self) -> Result<(), RankError> {
        self.control.failure().map_or(Ok(()), Err)
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn exchange(
        &self,
        _device: &Device,
        sends: Vec<(usize, View<'_, f32>)>,
        receives: Vec<(usize, ViewMut<'_, f32>)>,
    ) -> Result<(), RankError> {
        self.check()?;
        for (to, view) in sends {
            self.peer(to).send(view.read_stored().bytes);
        }
        for (from, mut view) in receives {
            let form = view.view().form();
            let bytes = self.receive_of(from, Some(form.n_bytes() * view.len()))?;
            view.write_stored(&Stored { form, bytes, scales: Vec::new() });
        }
        Ok(())
    }

    fn is_queued(&self) -> bool {
        false
    }

    fn send(&self, to: usize, bytes: Vec<u8>) {
        self.peer(to).send(bytes);
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>, RankError> {
        self.check()?;
        self.receive_of(from, None)
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        self.check()?;
        self.others().for_each(|(_, peer)| peer.send(bytes.to_vec()));
        let from_rank =
            |rank| if rank == self.rank { Ok(bytes.to_vec()) } else { self.receive_of(rank, None) };
        (0..self.world()).map(from_rank).collect()
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        self.check()?;
        if self.rank != 0 {
            self.peer(0).send(bytes);
            return Ok(Vec::new());
        }
        let others = (1..self.world()).map(|rank| self.receive_of(rank, None));
        std::iter::once(Ok(bytes)).chain(others).collect()
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, RankError> {
        self.check()?;
        if self.rank != 0 {
            return self.receive_of(0, None);
        }
        self.others().for_each(|(_, peer)| peer.send(bytes.to_vec()));
        Ok(bytes.to_vec())
    }

    fn fail(&self, problem: &str) -> RankError {
        self.control.fail(problem)
    }

    fn take_waited(&self) -> f64 {
        Duration::from_nanos(self.waited_nanos.swap(0, Ordering::Relaxed)).as_secs_f64()
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        if self.control.failure().is_none() {
            self.others().for_each(|(_, peer)| peer.flush());
        }
        self.control.leave();
    }
}

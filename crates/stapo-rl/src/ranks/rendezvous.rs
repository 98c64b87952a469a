//! How ranks find each other: all call rank 0, which sends each the addresses of the others; then every rank has one connection
//! to every other. Nothing listens any more once all are connected.

use super::environment::Membership;
use super::handshake::{Called, Caller, Purpose, answer, call, random};
use super::wire::{Packer, Unpacker};
use stapo_model::ranks::RankError;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// The connections of one rank.
pub struct Connections {
    /// Rank 0 to every other rank; every other rank to rank 0.
    pub control: Vec<(usize, TcpStream)>,
    /// By rank; `None` for the rank itself.
    pub data: Vec<Option<TcpStream>>,
}

/// The variable with the seconds that ranks wait for each other at the start.
const PATIENCE: &str = "STAPO_RANKS_START_TIMEOUT";
/// Between two attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Connections whose handshake is under way at one time.
const MAX_UNKNOWN: usize = 64;
/// Processes with another secret that rank 0 reports, at most.
const MAX_REPORTED: usize = 3;

fn patience() -> Duration {
    let given = std::env::var(PATIENCE).ok().and_then(|text| text.parse::<f64>().ok());
    Duration::from_secs_f64(given.filter(|seconds| (0.1..=86_400.0).contains(seconds)).unwrap_or(300.0))
}

/// Connects this process with all others. `report` gets what the user should know before all have met.
pub fn meet(membership: &Membership, report: &dyn Fn(&str)) -> Result<Connections, RankError> {
    let deadline = Instant::now() + patience();
    if membership.rank == 0 { lead(membership, deadline, report) } else { join(membership, deadline) }
}

fn error_of_rank(rank: usize, problem: String) -> RankError {
    RankError { rank, problem }
}

/// Rank 0: takes the calls of all others, and sends each the addresses of the others.
fn lead(membership: &Membership, deadline: Instant, report: &dyn Fn(&str)) -> Result<Connections, RankError> {
    let failed = |problem: String| error_of_rank(0, problem);
    let shown = format!("{}:{}", membership.address, membership.port);
    let listener = listen(membership).map_err(|e| failed(format!("listening on {shown}: {e}\nhint: MASTER_ADDR is the address of rank 0's machine, and MASTER_PORT must be free there")))?;
    let session = random().map_err(|e| failed(e.to_string()))?;
    let mut arrivals =
        Arrivals::open(listener, membership.token.as_bytes(), &session).map_err(|e| failed(e.to_string()))?;
    let mut control = BTreeMap::new();
    while control.len() + 1 < membership.world {
        let missing = || (1..membership.world).find(|rank| !control.contains_key(rank)).unwrap_or(0);
        let Some((caller, stream)) = arrivals.next(deadline, report) else {
            return Err(error_of_rank(
                missing(),
                format!(
                    "did not call rank 0 at {shown} in time\nhint: start all {} ranks, with the same MASTER_ADDR and MASTER_PORT, and {} if one has it",
                    membership.world,
                    super::TOKEN
                ),
            ));
        };
        check_caller(membership, &caller, Purpose::Control)?;
        if control.insert(caller.rank, (stream, caller.port)).is_some() {
            return Err(error_of_rank(caller.rank, "two processes say that they are this rank".into()));
        }
    }
    let mut addresses = Vec::new();
    for (rank, (stream, port)) in &control {
        let peer = stream.peer_addr().map_err(|e| error_of_rank(*rank, e.to_string()))?;
        addresses.push(SocketAddr::new(peer.ip(), *port));
    }
    let welcome = welcome(&session, &addresses);
    for (rank, (stream, _)) in &mut control {
        stream.write_all(&welcome).map_err(|e| error_of_rank(*rank, e.to_string()))?;
    }
    let mut data: Vec<Option<TcpStream>> = (0..membership.world).map(|_| None).collect();
    arrivals.take(membership, &mut data, deadline)?;
    Ok(Connections { control: control.into_iter().map(|(rank, (stream, _))| (rank, stream)).collect(), data })
}

/// Every other rank: calls rank 0, then those before it, and is called by those after it.
fn join(membership: &Membership, deadline: Instant) -> Result<Connections, RankError> {
    let fault = |error: io::Error| error_of_rank(membership.rank, error.to_string());
    let master = format!("{}:{}", membership.address, membership.port);
    let unreached = |error: io::Error| {
        error_of_rank(
            0,
            format!(
                "rank {} could not reach it at {master}: {error}\nhint: MASTER_ADDR and MASTER_PORT name rank 0's machine and port; {} must be the same on all ranks",
                membership.rank,
                super::TOKEN
            ),
        )
    };
    let (mut control, listener) = reach(membership, deadline).map_err(unreached)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
    control.set_read_timeout(Some(left)).map_err(fault)?;
    let (session, addresses) = read_welcome(&mut control, membership.world).map_err(unreached)?;
    control.set_read_timeout(None).map_err(fault)?;
    let mut arrivals = Arrivals::open(listener, &session, &session).map_err(fault)?;
    let mut data: Vec<Option<TcpStream>> = (0..membership.world).map(|_| None).collect();
    let (rank, world) = (membership.rank, membership.world);
    let caller = Caller { rank, world, purpose: Purpose::Data, port: 0 };
    let to_master = control.peer_addr().map_err(fault)?;
    for (rank, address) in std::iter::once(to_master).chain(addresses).enumerate().take(membership.rank) {
        let called = until(deadline, || {
            let mut stream = TcpStream::connect_timeout(&address, left)?;
            call(&mut stream, caller, &session)?;
            Ok(stream)
        });
        let named = |e: io::Error| {
            error_of_rank(rank, format!("rank {} could not reach it at {address}: {e}", membership.rank))
        };
        data[rank] = Some(called.map_err(named)?);
    }
    arrivals.take(membership, &mut data, deadline)?;
    Ok(Connections { control: vec![(0, control)], data })
}

fn check_caller(membership: &Membership, caller: &Caller, purpose: Purpose) -> Result<(), RankError> {
    let refuse = |problem: String| Err(error_of_rank(caller.rank, problem));
    if caller.world != membership.world {
        return refuse(format!(
            "was started as one of {}, rank {} as one of {}",
            caller.world, membership.rank, membership.world
        ));
    }
    if caller.rank == membership.rank || caller.rank >= membership.world || caller.purpose != purpose {
        return refuse("two processes say that they are this rank".into());
    }
    Ok(())
}

/// Listens where the other ranks look for rank 0. An address that is not this machine's own, as that of a service in front
/// of it, is listened for on all interfaces.
fn listen(membership: &Membership) -> io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> =
        (membership.address.as_str(), membership.port).to_socket_addrs()?.collect();
    TcpListener::bind(&addresses[..]).or_else(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), membership.port))
        }
        _ => Err(error),
    })
}

/// Calls rank 0 until it answers: it may not have started yet. Returns the connection, and a listener for other ranks at the
/// address by which this process reached rank 0: no other network of the machine is listened on.
fn reach(membership: &Membership, deadline: Instant) -> io::Result<(TcpStream, TcpListener)> {
    until(deadline, || {
        let mut last = io::Error::other("the address names no machine");
        for address in (membership.address.as_str(), membership.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
                Ok(mut stream) => {
                    let listener = TcpListener::bind((stream.local_addr()?.ip(), 0))?;
                    let port = listener.local_addr()?.port();
                    let (rank, world) = (membership.rank, membership.world);
                    let caller = Caller { rank, world, purpose: Purpose::Control, port };
                    call(&mut stream, caller, membership.token.as_bytes())?;
                    return Ok((stream, listener));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    })
}

/// Tries until it succeeds, another process is found to be no rank of this run, or the deadline has passed.
fn until<T>(deadline: Instant, attempt: impl Fn() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if error.kind() == io::ErrorKind::InvalidData || Instant::now() >= deadline => {
                return Err(error);
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// The secret of this meeting, and where the ranks from 1 on listen.
fn welcome(session: &[u8], addresses: &[SocketAddr]) -> Vec<u8> {
    let mut packer = Packer::default();
    packer.bytes(session);
    for address in addresses {
        packer.text(&address.to_string());
    }
    let mut framed = (packer.0.len() as u32).to_le_bytes().to_vec();
    framed.extend(packer.0);
    framed
}

fn read_welcome(stream: &mut TcpStream, world: usize) -> io::Result<(Vec<u8>, Vec<SocketAddr>)> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "its welcome cannot be read");
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    // An address with its length has fewer bytes than this.
    if len > 128 * (world + 1) {
        return Err(bad());
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    let mut read = Unpacker(&bytes);
    let session = read.bytes().map_err(|_| bad())?.to_vec();
    let mut addresses = Vec::new();
    for _ in 1..world {
        addresses.push(read.text().ok().and_then(|text| text.parse().ok()).ok_or_else(bad)?);
    }
    Ok((session, addresses))
}

/// The handshakes under way. Where there are too many, the oldest gives way: that of a rank takes milliseconds, so the oldest
/// is a stranger's.
#[derive(Default)]
struct Handshakes {
    n_begun: u64,
    /// By number, the oldest first.
    open: VecDeque<(u64, TcpStream)>,
}

/// One of the handshakes under way, for as long as the value lives.
struct Handshake {
    number: u64,
    all: Arc<Mutex<Handshakes>>,
}

impl Handshake {
    fn begin(all: &Arc<Mutex<Handshakes>>, stream: &TcpStream) -> io::Result<Self> {
        let stream = stream.try_clone()?;
        let mut handshakes = lock(all);
        if handshakes.open.len() >= MAX_UNKNOWN
            && let Some((_, oldest)) = handshakes.open.pop_front()
        {
            // A connection that is gone needs no end.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = handshakes.n_begun;
        handshakes.n_begun += 1;
        handshakes.open.push_back((number, stream));
        Ok(Self { number, all: Arc::clone(all) })
    }
}

impl Handshake {
    /// Ends the handshake, after which it gives way to no other. False if it has given way already.
    fn settle(&self) -> bool {
        let open = &mut lock(&self.all).open;
        let at = open.iter().position(|(number, _)| *number == self.number);
        at.and_then(|at| open.remove(at)).is_some()
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.settle();
    }
}

fn lock(handshakes: &Mutex<Handshakes>) -> MutexGuard<'_, Handshakes> {
    handshakes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connections to a listener whose handshake is done. Every handshake has a separate thread, so that a stranger who says
/// nothing delays no one else.
struct Arrivals {
    arrived: mpsc::Receiver<(Called, TcpStream)>,
    address: SocketAddr,
    is_open: Arc<AtomicBool>,
    n_reported: usize,
}

impl Arrivals {
    /// Control connections show that they know `secret`, data connections that they know `session`.
    fn open(listener: TcpListener, secret: &[u8], session: &[u8]) -> io::Result<Self> {
        let (send, arrived) = mpsc::channel();
        let mut address = listener.local_addr()?;
        if address.ip().is_unspecified() {
            address.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        let is_open = Arc::new(AtomicBool::new(true));
        let secrets: Arc<[Vec<u8>; 2]> = Arc::new([secret.to_vec(), session.to_vec()]);
        let handshakes = Arc::<Mutex<Handshakes>>::default();
        let open = Arc::clone(&is_open);
        std::thread::Builder::new().name("rendezvous".into()).spawn(move || {
            for stream in listener.incoming() {
                if !open.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                let Ok(handshake) = Handshake::begin(&handshakes, &stream) else { continue };
                let (send, secrets) = (send.clone(), Arc::clone(&secrets));
                let meet = move || {
                    if let Ok(called) = answer(&mut stream, &secrets[0], &secrets[1], || handshake.settle()) {
                        let _ = send.send((called, stream));
                    }
                };
                // Without a thread the connection is closed, and a rank calls again.
                let _ = std::thread::Builder::new().name("handshake".into()).spawn(meet);
            }
        })?;
        Ok(Self { arrived, address, is_open, n_reported: 0 })
    }

    /// The next rank that calls; `None` after the deadline. Processes with another secret are reported and turned away.
    fn next(&mut self, deadline: Instant, report: &dyn Fn(&str)) -> Option<(Caller, TcpStream)> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (called, stream) = self.arrived.recv_timeout(left).ok()?;
            match called {
                Called::Known(caller) => return Some((caller, stream)),
                Called::WrongSecret(rank) if self.n_reported < MAX_REPORTED => {
                    self.n_reported += 1;
                    let peer = stream.peer_addr().map_or("unknown".to_string(), |peer| peer.to_string());
                    report(&format!(
                        "a process at {peer} called as rank {rank} with another {} and was turned away",
                        super::TOKEN
                    ));
                }
                Called::WrongSecret(_) => {}
            }
        }
    }

    /// Takes the data connections of all ranks after this one.
    fn take(
        &mut self,
        membership: &Membership,
        data: &mut [Option<TcpStream>],
        deadline: Instant,
    ) -> Result<(), RankError> {
        while let Some(missing) = (membership.rank + 1..membership.world).find(|&rank| data[rank].is_none()) {
            let Some((caller, stream)) = self.next(deadline, &|_| ()) else {
                return Err(error_of_rank(
                    missing,
                    format!("did not connect to rank {} in time", membership.rank),
                ));
            };
            check_caller(membership, &caller, Purpose::Data)?;
            if caller.rank < membership.rank || data[caller.rank].replace(stream).is_some() {
                return Err(error_of_rank(caller.rank, "two processes say that they are this rank".into()));
            }
        }
        Ok(())
    }
}

impl Drop for Arrivals {
    /// Closes the listener: the thread looks at the mark when the next connection comes, which is this one.
    fn drop(&mut self) {
        self.is_open.store(false, Ordering::SeqCst);
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_listens_where_it_reached_rank_0_and_nowhere_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let _arrivals = Arrivals::open(listener, b"secret", b"session").unwrap();
        let (address, token) = ("127.0.0.1".to_string(), "secret".to_string());
        let membership = Membership { rank: 1, world: 2, local_rank: 1, n_local: 2, address, port, token };
        let (_control, of_rank_1) = reach(&membership, Instant::now() + Duration::from_secs(10)).unwrap();
        assert_eq!(of_rank_1.local_addr().unwrap().ip(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }

    #[test]
    fn a_caller_is_another_rank_of_as_many_with_the_same_purpose() {
        let (address, port, token) = ("127.0.0.1".to_string(), 1, String::new());
        let rank_1 = Membership { rank: 1, world: 4, local_rank: 0, n_local: 1, address, port, token };
        let check = |rank, world, purpose| {
            let caller = Caller { rank, world, purpose, port: 0 };
            check_caller(&rank_1, &caller, Purpose::Data).map_err(|error| (error.rank, error.problem))
        };
        assert_eq!([0, 2, 3].map(|rank| check(rank, 4, Purpose::Data)), [Ok(()), Ok(()), Ok(())]);
        let other_world = (2, "was started as one of 3, rank 1 as one of 4".to_string());
        assert_eq!(check(2, 3, Purpose::Data), Err(other_world));
        for (rank, purpose) in [(1, Purpose::Data), (4, Purpose::Data), (2, Purpose::Control)] {
            let (named, problem) = check(rank, 4, purpose).unwrap_err();
            assert_eq!((named, problem.as_str()), (rank, "two processes say that they are this rank"));
        }
    }
}

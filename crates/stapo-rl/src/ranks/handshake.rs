//! How two processes prove to each other that they belong to one run: each shows that it knows the secret, without sending
//! it. Whoever does not is turned away after a few hundred bytes.

use super::wire::{Malformed, Packer, Unpacker};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Signs of life and failures.
    Control,
    /// Everything else.
    Data,
}

/// The rank that connects, as it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub rank: usize,
    pub world: usize,
    pub purpose: Purpose,
    /// Where the caller itself listens for other ranks.
    pub port: u16,
}

/// Begins every handshake; the number changes with the messages between ranks.
const MAGIC: &[u8; 8] = b"STAPO-R1";
const NONCE: usize = 32;
/// Longer messages of a handshake are refused.
const MAX_MESSAGE: usize = 512;
/// A process whose handshake takes longer is turned away.
const PATIENCE: Duration = Duration::from_secs(5);

/// The proof that one side knows the secret: a hash over the secret, both nonces and what the side says.
fn proof(side: &str, secret: &[u8], nonces: [&[u8; NONCE]; 2], said: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [side.as_bytes(), secret, nonces[0], nonces[1], said] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Whether two proofs are equal, in a time that does not depend on where they differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn refused(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.to_string())
}

/// Random bytes of the operating system.
pub fn random() -> io::Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

fn send(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(bytes)
}

fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_MESSAGE {
        return Err(refused("is no rank of this program"));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A connection during its handshake. All reads and writes share one deadline.
struct Timed<'a> {
    stream: &'a mut TcpStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    fn begin(stream: &'a mut TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, deadline: Instant::now() + PATIENCE })
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its handshake takes too long"));
        }
        Ok(left)
    }

    /// Lets the connection live on without a deadline.
    fn end(self) -> io::Result<()> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Caller {
    fn to_bytes(self) -> Vec<u8> {
        let mut packer = Packer::default();
        packer.number(self.rank);
        packer.number(self.world);
        packer.byte(u8::from(self.purpose == Purpose::Data));
        packer.number(self.port.into());
        packer.0
    }

    fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut read = Unpacker(bytes);
        Ok(Caller {
            rank: read.number()?,
            world: read.number()?,
            purpose: if read.byte()? == 0 { Purpose::Control } else { Purpose::Data },
            port: u16::try_from(read.number()?).map_err(|_| Malformed)?,
        })
    }
}

/// The side that connects. Fails where the other side is no rank, or does not know the secret.
pub fn call(stream: &mut TcpStream, caller: Caller, secret: &[u8]) -> io::Result<()> {
    let mut timed = Timed::begin(stream)?;
    let theirs = receive(&mut timed)?;
    let nonce: [u8; NONCE] = theirs
        .strip_prefix(MAGIC)
        .and_then(|nonce| nonce.try_into().ok())
        .ok_or_else(|| refused("is no rank of this program"))?;
    let caller_nonce = random()?;
    let said = caller.to_bytes();
    let proof_of_caller = proof("caller", secret, [&nonce, &caller_nonce], &said);
    send(&mut timed, &[MAGIC, &caller_nonce[..], &proof_of_caller[..], &said[..]].concat())?;
    let answer = receive(&mut timed)?;
    if !is_same(&answer, &proof("listener", secret, [&caller_nonce, &nonce], &said)) {
        return Err(refused("does not know the secret of this run"));
    }
    timed.end()
}

/// Who called, as far as the listener knows.
#[derive(Debug, PartialEq, Eq)]
pub enum Called {
    /// A rank of this run.
    Known(Caller),
    /// A process that says it is this rank of a run with another secret.
    WrongSecret(usize),
}

/// The side that listens. Callers for control know the secret of the run, those for data that of the session, which rank 0
/// gave them. `settle` is called before the caller learns that it is known, and says whether the connection is still open.
pub fn answer(
    stream: &mut TcpStream,
    run_secret: &[u8],
    session: &[u8],
    settle: impl FnOnce() -> bool,
) -> io::Result<Called> {
    let mut timed = Timed::begin(stream)?;
    let listener_nonce = random()?;
    send(&mut timed, &[&MAGIC[..], &listener_nonce[..]].concat())?;
    let message = receive(&mut timed)?;
    let no_rank = || refused("is no rank of this program");
    let rest = message.strip_prefix(MAGIC).ok_or_else(no_rank)?;
    let (nonce, rest) = rest.split_first_chunk::<NONCE>().ok_or_else(no_rank)?;
    let (theirs, said) = rest.split_first_chunk::<32>().ok_or_else(no_rank)?;
    let caller = Caller::read(said).map_err(|Malformed| no_rank())?;
    let secret = match caller.purpose {
        Purpose::Control => run_secret,
        Purpose::Data => session,
    };
    if !is_same(theirs, &proof("caller", secret, [&listener_nonce, nonce], said)) {
        // A rank with another secret learns of it at once, and a stranger learns nothing.
        send(&mut timed, b"no")?;
        return Ok(Called::WrongSecret(caller.rank));
    }
    if !settle() {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    send(&mut timed, &proof("listener", secret, [nonce, &listener_nonce], said))?;
    timed.end()?;
    Ok(Called::Known(caller))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// What a listener answers to a message after its nonce.
    type Answer = fn(&[u8], [u8; NONCE]) -> Vec<u8>;

    #[test]
    fn no_two_nonces_are_the_same() {
        assert_ne!(random().unwrap(), random().unwrap());
    }

    /// The caller's own proof, an empty one and the answer of a listener with another secret prove nothing.
    #[test]
    fn a_listener_without_the_secret_is_refused_by_the_caller() {
        let caller = Caller { rank: 1, world: 2, purpose: Purpose::Control, port: 7 };
        let answers: [Answer; 4] = [
            |_, _| Vec::new(),
            |_, _| b"no".to_vec(),
            |message, _| message[MAGIC.len() + NONCE..][..32].to_vec(),
            |message, nonce| {
                let (theirs, said) = message[MAGIC.len()..].split_first_chunk::<NONCE>().unwrap();
                proof("listener", b"guessed", [theirs, &nonce], &said[32..]).to_vec()
            },
        ];
        for (idx, answer) in answers.into_iter().enumerate() {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let impostor = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let nonce = [idx as u8; NONCE];
                send(&mut stream, &[&MAGIC[..], &nonce[..]].concat()).unwrap();
                let message = receive(&mut stream).unwrap();
                send(&mut stream, &answer(&message, nonce)).unwrap();
            });
            let error = call(&mut stream, caller, b"secret").unwrap_err();
            assert!(error.to_string().contains("does not know the secret"), "answer {idx}: {error}");
            impostor.join().unwrap();
        }
    }

    #[test]
    fn a_handshake_has_one_deadline_for_all_its_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut dripping = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let began = Instant::now();
        let mut timed = Timed { stream: &mut stream, deadline: began + Duration::from_millis(300) };
        let drip = std::thread::spawn(move || {
            while dripping.write_all(&[0]).is_ok() && began.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let error = timed.read_exact(&mut [0; 1000]).unwrap_err();
        let is_late = matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
        assert!(is_late && began.elapsed() < Duration::from_secs(1), "{error} after {:?}", began.elapsed());
        drop(stream);
        drip.join().unwrap();
    }
}

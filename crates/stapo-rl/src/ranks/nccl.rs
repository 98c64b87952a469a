//! Ranks with a GPU each: gradients and weights go from GPU to GPU by NCCL, everything else by TCP.

use super::tcp::Tcp;
use stapo_model::cuda::{Communicator, ID_BYTES, nccl_version, unique_id};
use stapo_model::ranks::{RankError, Ranks, Transport};
use stapo_model::{Device, View, ViewMut};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The transport of ranks with a GPU each.
pub struct Nccl {
    tcp: Arc<Tcp>,
    gpus: Arc<Communicator>,
}

/// How often NCCL is asked for errors.
const ASKED: Duration = Duration::from_millis(500);
/// The variable that chooses how GPUs exchange numbers: `nccl`, or `tcp` for the way through the host.
const CHOICE: &str = "STAPO_RANKS_TRANSPORT";

impl Nccl {
    /// The ranks of GPUs that all have NCCL. `None` if the numbers go through the host: on a CPU, where no rank has
    /// NCCL, or where the environment says so.
    pub fn of_devices(tcp: &Arc<Tcp>, device: &Device) -> Result<Option<Ranks>, RankError> {
        let fault = |problem: String| RankError { rank: tcp.rank(), problem };
        let is_wanted = device.is_async() && std::env::var(CHOICE).as_deref() != Ok("tcp");
        let version = if is_wanted { nccl_version().unwrap_or_default() } else { String::new() };
        let all = tcp.all_gather(version.as_bytes())?;
        if let Some((rank, found)) = all.iter().enumerate().find(|(_, found)| **found != all[0]) {
            let shown = |version: &[u8]| match version {
                [] => "no NCCL".to_string(),
                version => format!("NCCL {}", String::from_utf8_lossy(version)),
            };
            let problem = format!(
                "has {}, and rank 0 has {}\nhint: install the same on all, or set {CHOICE}=tcp on all",
                shown(found),
                shown(&all[0])
            );
            return Err(RankError { rank, problem });
        }
        if version.is_empty() {
            return Ok(None);
        }
        let id = match tcp.rank() {
            0 => unique_id().map_err(|error| fault(error.to_string()))?.to_vec(),
            _ => Vec::new(),
        };
        let id: [u8; ID_BYTES] = tcp
            .broadcast(&id)?
            .try_into()
            .map_err(|_| RankError { rank: 0, problem: "sent no NCCL id".into() })?;
        let joined = Communicator::join(device, &id, tcp.rank(), tcp.world());
        let Some(gpus) = joined.map_err(|error| tcp.fail(&error.to_string()))? else { return Ok(None) };
        let gpus = Arc::new(gpus);
        let aborted = Arc::clone(&gpus);
        tcp.on_failure(move || aborted.abort());
        watch(tcp, &gpus).map_err(|error| fault(error.to_string()))?;
        Ok(Some(Arc::new(Nccl { tcp: Arc::clone(tcp), gpus })))
    }
}

/// Asks NCCL for errors as long as its communicator is in use; an error stops all ranks.
fn watch(tcp: &Arc<Tcp>, gpus: &Arc<Communicator>) -> std::io::Result<()> {
    let (tcp, gpus): (Weak<Tcp>, Weak<Communicator>) = (Arc::downgrade(tcp), Arc::downgrade(gpus));
    let ask = move || {
        loop {
            std::thread::sleep(ASKED);
            let (Some(tcp), Some(gpus)) = (tcp.upgrade(), gpus.upgrade()) else { return };
            if tcp.failure().is_some() {
                return;
            }
            if let Err(error) = gpus.check() {
                tcp.fail(&error.to_string());
                return;
            }
        }
    };
    std::thread::Builder::new().name("NCCL errors".into()).spawn(ask)?;
    Ok(())
}

impl Transport for Nccl {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn world(&self) -> usize {
        self.tcp.world()
    }

    fn exchange(
        &self,
        device: &Device,
        sends: Vec<(usize, View<'_, f32>)>,
        receives: Vec<(usize, ViewMut<'_, f32>)>,
    ) -> Result<(), RankError> {
        if let Some(failure) = self.tcp.failure() {
            return Err(failure);
        }
        self.gpus.exchange(device, &sends, &receives).map_err(|error| self.tcp.fail(&error.to_string()))
    }

    fn is_queued(&self) -> bool {
        true
    }

    fn send(&self, to: usize, bytes: Vec<u8>) {
        self.tcp.send(to, bytes);
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>, RankError> {
        self.tcp.receive(from)
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        self.tcp.all_gather(bytes)
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        self.tcp.gather(bytes)
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, RankError> {
        self.tcp.broadcast(bytes)
    }

    fn fail(&self, problem: &str) -> RankError {
        self.tcp.fail(problem)
    }

    fn take_waited(&self) -> f64 {
        self.tcp.take_waited()
    }
}

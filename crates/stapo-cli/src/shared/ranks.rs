//! The rank of this process among several that work together, and what it opens there.

use crate::shared::program::{PROGRAM, writer};
use crate::shared::run_folder::{self, Use};
use crate::shared::stop::Stop;
use crate::shared::terminal::set_quiet;
use anyhow::Result;
use stapo_core::record::{Identity, Writer};
use stapo_rl::Plan;
use stapo_rl::device::{Device, DeviceName, cuda};
use stapo_rl::policy::identity;
use stapo_rl::ranks::{Fact, Flags, Membership, Nccl, RankError, Ranks, Solo, Tcp, agree, agree_on_inputs};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;

/// Flags for a process that is started as one of several by hand; launchers give the same by variables.
#[derive(clap::Args, Debug, Default, PartialEq, Eq)]
pub struct RankFlags {
    /// The number of this process among several that work together, from 0; by default read from the variables of
    /// torchrun, Slurm, MPI or a Kubernetes indexed job. `stapo launch` starts several on this machine.
    #[arg(long, requires = "world", help_heading = "Several processes")]
    rank: Option<usize>,

    /// How many processes work together.
    #[arg(long, requires = "rank", help_heading = "Several processes")]
    world: Option<usize>,

    /// The number of this process on its machine, which chooses its GPU.
    #[arg(long, requires = "rank", help_heading = "Several processes")]
    local_rank: Option<usize>,

    /// The address of rank 0.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "rank", help_heading = "Several processes")]
    master: Option<String>,
}

/// A process with its ranks.
pub struct Joined {
    pub ranks: Ranks,
    /// `None` for a process that works alone.
    others: Option<(Membership, Arc<Tcp>)>,
}

impl Joined {
    /// A process that works by itself.
    pub fn alone() -> Self {
        Self { ranks: Solo::ranks(), others: None }
    }

    /// Meets the other ranks and runs what this one does: `lead` on the first rank, `follow` on the others.
    pub fn work<T>(
        flags: &RankFlags,
        lead: impl FnOnce(&Self) -> Result<T>,
        follow: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<T> {
        let joined = Self::meet(flags)?;
        joined.run(|| if joined.is_first() { lead(&joined) } else { follow(&joined) })
    }

    /// Meets the other ranks, where there are any. Ranks other than the first say nothing but errors.
    fn meet(flags: &RankFlags) -> Result<Self> {
        let RankFlags { rank, world, local_rank, master } = flags;
        let flags = Flags { rank: *rank, world: *world, local_rank: *local_rank, master: master.clone() };
        let membership = Membership::find(&flags)?;
        let Some(membership) = membership else { return Ok(Self::alone()) };
        let tcp = Tcp::connect(&membership, &|text| eprintln!("warning: {text}"))?;
        let ranks: Ranks = Arc::<Tcp>::clone(&tcp);
        if ranks.rank() > 0 {
            set_quiet(true);
        }
        Ok(Self { ranks, others: Some((membership, tcp)) })
    }

    /// The ranks for numbers on that device: GPUs speak by NCCL where all have it.
    fn ranks_on(&self, device: &Device) -> Result<Ranks> {
        let Some((_, tcp)) = &self.others else { return Ok(Ranks::clone(&self.ranks)) };
        if let Some(ranks) = Nccl::of_devices(tcp, device)? {
            return Ok(ranks);
        }
        if device.is_async() {
            eprintln!(
                "note: gradients and weights go through the host: libnccl.so.2 was not found, or STAPO_RANKS_TRANSPORT=tcp"
            );
        }
        Ok(Ranks::clone(&self.ranks))
    }

    fn is_first(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// Runs what this rank does. An error becomes that of all ranks.
    fn run<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = cuda::guard(work).unwrap_or_else(|lost| Err(lost.into()));
        let is_known = |error: &anyhow::Error| error.chain().any(is_of_rank);
        match outcome {
            // What every rank has found or received needs no message.
            Err(error) if is_known(&error) => Err(error),
            Err(error) if self.ranks.world() > 1 => Err(self.ranks.fail(&crate::chain_text(&error)).into()),
            outcome => outcome,
        }
    }

    /// Opens the device of this rank for a training plan, once all ranks have the same plan and the same inputs. Returns the
    /// device, the ranks for numbers on it, and the identity of the run.
    pub fn open(
        &self,
        plan: &Plan,
        threads: Option<usize>,
        identity: impl FnOnce() -> stapo_rl::Result<Identity>,
    ) -> Result<(Device, Ranks, Identity)> {
        self.agree_on_plan(plan)?;
        let device = self.device(plan.device(), threads, Use::for_plan(plan))?;
        let identity = identity()?;
        agree_on_inputs(&*self.ranks, &identity.inputs)?;
        let ranks = self.ranks_on(&device)?;
        Ok((device, ranks, identity))
    }

    /// This process, as folders name it.
    pub fn writer(&self, device: DeviceName) -> Writer {
        Writer { world: self.ranks.world(), ..writer(device) }
    }

    /// Compares program and plan with those of the other ranks.
    fn agree_on_plan(&self, plan: &Plan) -> Result<()> {
        let mut facts: Vec<Fact> = identity::facts_of_plan(plan, PROGRAM);
        if let DeviceName::Cuda { .. } = plan.device() {
            facts.extend(libraries());
        }
        Ok(agree(&*self.ranks, &facts)?)
    }

    /// Compares program, kind of device and libraries with those of the other ranks.
    pub fn agree_on_program(&self, device: DeviceName) -> Result<()> {
        let kind = identity::device_kind(device);
        let mut facts: Vec<Fact> =
            vec![("program".to_string(), PROGRAM.to_string()), ("device".to_string(), kind)];
        if let DeviceName::Cuda { .. } = device {
            facts.extend(libraries());
        }
        Ok(agree(&*self.ranks, &facts)?)
    }

    /// Opens the device of this rank: of several GPUs on a machine, each process has its own; cores are shared out.
    pub fn device(&self, name: DeviceName, threads: Option<usize>, for_use: Use) -> Result<Device> {
        let Some((membership, _)) = &self.others else { return run_folder::device(name, threads, for_use) };
        match name {
            DeviceName::Cuda { .. } => {
                let n_gpus = cuda::probe().gpus.len().max(1);
                let name = DeviceName::Cuda { ordinal: membership.local_rank % n_gpus };
                run_folder::device(name, threads, for_use)
            }
            DeviceName::Cpu => {
                let n_cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
                let is_given = threads.is_some() || std::env::var_os("STAPO_THREADS").is_some();
                let shared = Some(threads_of_rank(n_cores, membership.n_local));
                run_folder::device(name, if is_given { threads } else { shared }, for_use)
            }
        }
    }
}

/// As [`Joined::work`] for a command that signals stop. A process that is alone, or has not met the other ranks, ends at the first
/// signal until it begins its work. Where all ranks were asked to stop and another one has ended first, the status is the
/// signal's.
pub fn work_until_asked(
    flags: &RankFlags,
    stop: &Stop,
    lead: impl FnOnce(&Joined) -> Result<ExitCode>,
    follow: impl FnOnce(&Joined) -> Result<ExitCode>,
) -> Result<ExitCode> {
    stop.prepare();
    let met = |joined: &Joined| {
        if joined.others.is_some() {
            stop.begin_work();
        }
    };
    let lead = |joined: &Joined| {
        met(joined);
        lead(joined)
    };
    let follow = |joined: &Joined| {
        met(joined);
        follow(joined)
    };
    let is_of_rank = |error: &anyhow::Error| error.chain().any(is_of_rank);
    match Joined::work(flags, lead, follow) {
        Err(error) if stop.is_raised() && is_of_rank(&error) => {
            eprintln!("stopped by {}: {}", stop.name(), crate::chain_text(&error));
            Ok(ExitCode::from(stop.exit_status()))
        }
        work => work,
    }
}

/// The threads of each of the ranks on a machine.
fn threads_of_rank(n_cores: usize, n_local: usize) -> usize {
    (n_cores / n_local).max(1)
}

/// Whether an error is of another rank, or of all.
fn is_of_rank(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<RankError>() || matches!(cause.downcast_ref(), Some(stapo_rl::Error::Rank(_)))
}

/// The GPU and the libraries on which bits depend.
fn libraries() -> Vec<Fact> {
    let found = cuda::probe();
    let gpu = found.gpus.first().map_or("none".to_string(), |gpu| gpu.name.clone());
    let version = |library: &cuda::FoundLibrary| match library {
        cuda::FoundLibrary::Version(version) => version.clone(),
        cuda::FoundLibrary::Missing { .. } => "missing".to_string(),
    };
    let facts = [("GPU", gpu), ("NVRTC", version(&found.nvrtc)), ("cuBLASLt", version(&found.cublaslt))];
    facts.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_cores_and_have_one_at_least() {
        assert_eq!([1, 2, 3, 9].map(|n_local| threads_of_rank(8, n_local)), [8, 4, 2, 1]);
    }
}

//! The place of a process among its ranks, as its launcher says: by flags, or by the variables of torchrun, Slurm, Open MPI,
//! other MPIs, or an indexed job of Kubernetes.

use thiserror::Error;

/// The variable with the secret that all ranks of a run know.
pub const TOKEN: &str = "STAPO_RANKS_TOKEN";

/// One process among several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    pub rank: usize,
    pub world: usize,
    /// The number of this process among those of its machine, which gives it its GPU.
    pub local_rank: usize,
    /// Processes on this machine, which share its cores; 1 if the launcher does not say.
    pub n_local: usize,
    /// Where rank 0 listens.
    pub address: String,
    pub port: u16,
    /// A secret that all ranks know; empty if none is given.
    pub token: String,
}

/// What the command line says about the ranks; what it does not say comes from the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    pub rank: Option<usize>,
    pub world: Option<usize>,
    pub local_rank: Option<usize>,
    /// `ADDRESS:PORT` of rank 0.
    pub master: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MembershipError {
    #[error("environment variable {name}: {value:?} is not {expected}")]
    Value { name: String, value: String, expected: &'static str },
    #[error("{from}: rank {rank} of {world} processes; ranks count from 0")]
    Rank { from: &'static str, rank: usize, world: usize },
    #[error(
        "{from}: says rank {rank} and not how many there are\nhint: set WORLD_SIZE to the number of processes (for a Kubernetes indexed job, its completions)"
    )]
    NoWorld { from: &'static str, rank: usize },
    #[error(
        "{from}: rank {rank} of {world}, and no address of rank 0\nhint: set MASTER_ADDR and MASTER_PORT to where rank 0 listens, or give --master ADDRESS:PORT"
    )]
    NoAddress { from: &'static str, rank: usize, world: usize },
    #[error("--master {0:?}: expected ADDRESS:PORT")]
    Master(String),
}

/// The port of rank 0 where the launcher names none.
const PORT: u16 = 29_577;

/// A launcher's names for the variables. A launcher is taken where both its rank and its mark are set.
struct Convention {
    name: &'static str,
    rank: &'static str,
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    n_local: &'static [&'static str],
    /// A variable that is set only where this launcher started the process.
    mark: &'static str,
}

const CONVENTIONS: [Convention; 5] = [
    Convention {
        name: "RANK and WORLD_SIZE",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        n_local: &["LOCAL_WORLD_SIZE"],
        mark: "WORLD_SIZE",
    },
    Convention {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        n_local: &["SLURM_STEP_TASKS_PER_NODE"],
        // A batch script has a rank too, without being one of several: only srun sets this.
        mark: "SLURM_STEP_NUM_TASKS",
    },
    Convention {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        n_local: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        mark: "OMPI_COMM_WORLD_SIZE",
    },
    Convention {
        name: "MPI",
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        n_local: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        mark: "PMI_SIZE",
    },
    Convention {
        name: "Kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        world: &["WORLD_SIZE"],
        local_rank: &[],
        n_local: &[],
        mark: "JOB_COMPLETION_INDEX",
    },
];

impl Membership {
    /// The rank of this process and how it reaches the others; `None` for a process that works alone.
    pub fn find(flags: &Flags) -> Result<Option<Self>, MembershipError> {
        Self::read(flags, &|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(flags: &Flags, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, MembershipError> {
        let number = |name: &str| -> Result<Option<usize>, MembershipError> {
            let Some(value) = get(name) else { return Ok(None) };
            let parsed = leading_number(&value);
            let error = || MembershipError::Value { name: name.into(), value, expected: "a number" };
            parsed.map(Some).ok_or_else(error)
        };
        let first = |names: &[&str]| -> Result<Option<usize>, MembershipError> {
            names.iter().find_map(|name| number(name).transpose()).transpose()
        };
        let is_marked = |c: &&Convention| get(c.rank).is_some() && get(c.mark).is_some();
        let convention = CONVENTIONS.iter().find(is_marked);
        let from = if flags.rank.is_some() { "--rank" } else { convention.map_or("", |c| c.name) };
        let number_of = |names: fn(&Convention) -> &'static [&'static str]| {
            convention.map_or(Ok(None), |c| first(names(c)))
        };
        let rank = match flags.rank {
            Some(rank) => Some(rank),
            None => convention.map_or(Ok(None), |c| number(c.rank))?,
        };
        let Some(rank) = rank else { return Ok(None) };
        let world = flags.world.map_or_else(|| number_of(|c| c.world), |world| Ok(Some(world)))?;
        let Some(world) = world else { return Err(MembershipError::NoWorld { from, rank }) };
        if rank >= world {
            return Err(MembershipError::Rank { from, rank, world });
        }
        if world == 1 {
            return Ok(None);
        }
        let local_rank =
            flags.local_rank.map_or_else(|| number_of(|c| c.local_rank), |rank| Ok(Some(rank)))?;
        let (address, port) = address(flags, get)?.ok_or(MembershipError::NoAddress { from, rank, world })?;
        Ok(Some(Membership {
            rank,
            world,
            local_rank: local_rank.unwrap_or(0),
            n_local: number_of(|c| c.n_local)?.unwrap_or(1).max(1),
            address,
            port,
            token: get(TOKEN).unwrap_or_default(),
        }))
    }
}

/// The number at the start of a value, as in `4(x2)` for four tasks on each of two machines.
fn leading_number(value: &str) -> Option<usize> {
    let digits: String = value.trim().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Where rank 0 listens.
fn address(
    flags: &Flags,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<(String, u16)>, MembershipError> {
    if let Some(master) = &flags.master {
        let wrong = || MembershipError::Master(master.clone());
        let (address, port) = master.rsplit_once(':').ok_or_else(wrong)?;
        let address = address.trim_start_matches('[').trim_end_matches(']');
        return Ok(Some((address.to_string(), port.parse().map_err(|_| wrong())?)));
    }
    let port = match get("MASTER_PORT") {
        None => None,
        Some(value) => {
            let error = || MembershipError::Value {
                name: "MASTER_PORT".into(),
                value: value.clone(),
                expected: "a port",
            };
            Some(value.trim().parse::<u16>().map_err(|_| error())?)
        }
    };
    if let Some(address) = get("MASTER_ADDR") {
        // Under torchrun the port belongs to the store of its agent.
        let is_taken = get("TORCHELASTIC_RUN_ID").is_some();
        let port = port.map_or(PORT, |port| if is_taken { neighbouring(port) } else { port });
        return Ok(Some((address, port)));
    }
    let nodes = get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"));
    let job = get("SLURM_JOB_ID").and_then(|id| leading_number(&id)).unwrap_or(0);
    let of_job = PORT.wrapping_add((job % 1000) as u16);
    Ok(nodes.and_then(|nodes| first_node(&nodes)).map(|node| (node, port.unwrap_or(of_job))))
}

/// A port near a given one.
fn neighbouring(port: u16) -> u16 {
    if port > u16::MAX - 1000 { port - 1000 } else { port + 1000 }
}

/// The first machine of a Slurm list, such as `gpu01` of `gpu[01-04,07],fat1`.
fn first_node(list: &str) -> Option<String> {
    let Some((before, rest)) = list.split_once('[') else {
        return list.split(',').next().map(str::to_string).filter(|node| !node.is_empty());
    };
    if let Some((node, _)) = before.split_once(',') {
        return Some(node.to_string());
    }
    let (inside, after) = rest.split_once(']')?;
    let first = inside.split([',', '-']).next()?;
    let suffix: String = after.chars().take_while(|c| *c != ',').collect();
    Some(format!("{before}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(flags: &Flags, variables: &[(&str, &str)]) -> Result<Option<Membership>, MembershipError> {
        let get = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string())
        };
        Membership::read(flags, &get)
    }

    fn found(variables: &[(&str, &str)]) -> (usize, usize, usize, usize, String, u16) {
        let membership = membership(&Flags::default(), variables).unwrap().unwrap();
        let Membership { rank, world, local_rank, n_local, address, port, .. } = membership;
        (rank, world, local_rank, n_local, address, port)
    }

    #[test]
    fn every_launcher_gives_a_place() {
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
        ];
        assert_eq!(found(&torchrun), (5, 8, 1, 4, "node0".into(), 30500));
        assert_eq!(found(&torchrun[..6]), (5, 8, 1, 4, "node0".into(), 29500));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_JOB_ID", "1234"),
            ("SLURM_STEP_NODELIST", "gpu[07-08]"),
        ];
        assert_eq!(found(&slurm), (3, 4, 1, 2, "gpu07".into(), PORT + 234));
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
        assert_eq!(found(&mpi), (1, 2, 0, 1, "a".into(), PORT));
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "7")];
        assert_eq!(found(&pmi), (1, 2, 0, 1, "a".into(), 7));
        let job = [("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "job-0.svc")];
        assert_eq!(found(&job), (2, 3, 0, 1, "job-0.svc".into(), PORT));
    }

    #[test]
    fn flags_come_before_the_environment() {
        let flags =
            Flags { rank: Some(1), world: Some(2), local_rank: Some(1), master: Some("[::1]:99".into()) };
        let membership =
            membership(&flags, &[("RANK", "0"), ("WORLD_SIZE", "9"), (TOKEN, "secret")]).unwrap().unwrap();
        assert_eq!((membership.rank, membership.world, membership.local_rank), (1, 2, 1));
        assert_eq!(
            (membership.address.as_str(), membership.port, membership.token.as_str()),
            ("::1", 99, "secret")
        );
    }

    #[test]
    fn a_process_alone_has_no_place() {
        for alone in
            [&[][..], &[("RANK", "0"), ("WORLD_SIZE", "1")], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]]
        {
            assert_eq!(membership(&Flags::default(), alone), Ok(None), "{alone:?}");
        }
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let said =
            |variables: &[(&str, &str)]| membership(&Flags::default(), variables).unwrap_err().to_string();
        assert!(said(&[("JOB_COMPLETION_INDEX", "1")]).contains("WORLD_SIZE"));
        assert!(said(&[("RANK", "1"), ("WORLD_SIZE", "2")]).contains("MASTER_ADDR"));
        assert!(said(&[("RANK", "x"), ("WORLD_SIZE", "2")]).starts_with("environment variable RANK: \"x\""));
        assert!(said(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("count from 0"));
        let port = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "p")];
        assert!(said(&port).contains("MASTER_PORT"));
    }

    #[test]
    fn the_first_machine_of_a_list_is_that_of_rank_0() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("gpu[03-04,07],fat1", "gpu03"),
            ("fat1,gpu[03-04]", "fat1"),
            ("rack[2]-a,rack[3]-a", "rack2-a"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
    }

    #[test]
    fn ports_and_places_on_a_machine_follow_each_launcher() {
        let torchrun = |port: &str| {
            let variables = [
                ("RANK", "1"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", port),
                ("TORCHELASTIC_RUN_ID", "x"),
            ];
            found(&variables).5
        };
        // Beside the store of the agent, within the range of ports.
        assert_eq!(["64535", "64536", "65535"].map(torchrun), [65_535, 63_536, 64_535]);
        let intel = [
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("MPI_LOCALRANKID", "1"),
            ("MPI_LOCALNRANKS", "2"),
            ("MASTER_ADDR", "a"),
        ];
        assert_eq!(found(&intel), (3, 4, 1, 2, "a".into(), PORT));
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("MASTER_ADDR", "a"),
        ];
        assert_eq!(found(&open_mpi), (5, 8, 1, 4, "a".into(), PORT));
        let slurm = |more: &[(&'static str, &'static str)]| {
            let step = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_NTASKS", "9")];
            found(&[&step[..], more].concat())
        };
        let nodes = ("SLURM_JOB_NODELIST", "n[1-2]");
        assert_eq!(slurm(&[nodes]), (1, 2, 0, 1, "n1".into(), PORT));
        assert_eq!(slurm(&[nodes, ("SLURM_JOB_ID", "1999"), ("MASTER_PORT", "7")]).5, 7);
        assert_eq!(slurm(&[nodes, ("SLURM_JOB_ID", "1999")]).5, PORT + 999);
        assert_eq!(slurm(&[nodes, ("MASTER_ADDR", "given")]).4, "given");
    }

    #[test]
    fn what_the_command_line_leaves_out_comes_from_the_environment() {
        let torchrun = [
            ("RANK", "0"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "3"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "9"),
        ];
        let flags = Flags { rank: Some(2), ..Flags::default() };
        let found = membership(&flags, &torchrun).unwrap().unwrap();
        assert_eq!((found.rank, found.world, found.local_rank, found.port), (2, 4, 3, 9));
        let alone = Flags { rank: Some(1), world: Some(3), ..Flags::default() };
        let said = membership(&alone, &[]).unwrap_err().to_string();
        assert!(said.starts_with("--rank: rank 1 of 3, and no address of rank 0"), "{said}");
        let master = |text: &str| {
            membership(&Flags { master: Some(text.into()), ..alone.clone() }, &[]).map_err(|e| e.to_string())
        };
        assert_eq!(master("node:7").unwrap().unwrap().address, "node");
        for wrong in ["node", "node:", "node:70000"] {
            assert!(master(wrong).unwrap_err().contains("expected ADDRESS:PORT"), "{wrong}");
        }
        let far = Flags { rank: Some(3), ..alone };
        assert!(membership(&far, &[]).unwrap_err().to_string().contains("rank 3 of 3 processes"));
    }
}

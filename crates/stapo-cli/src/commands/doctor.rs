//! `stapo doctor`

use crate::shared::machine;
use crate::shared::units::size;
use anyhow::Result;
use serde_json::json;
use stapo_rl::device::cuda::{self, Found, FoundLibrary};
use stapo_rl::device::{CpuOptions, Simd};
use stapo_rl::plan::host::HostMemory;
use stapo_rl::ranks::{Flags, Membership, TOKEN};
use stapo_rl::reward::CodeSpec;
use stapo_rl::reward::code::CodeJudge;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Checks this machine: what it offers, what is missing, and how to get it.
#[derive(clap::Args)]
pub struct Args {
    /// The folder where runs will be written.
    #[arg(short, long, value_name = "DIR", default_value = "runs")]
    out: PathBuf,

    /// One JSON object, sizes in bytes.
    #[arg(long)]
    json: bool,
}

/// Free disk, in bytes, below which doctor warns: a run keeps checkpoints.
const LITTLE_DISK: u64 = 1 << 30;

/// One line of the report.
struct Finding {
    name: &'static str,
    status: Status,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Status {
    Good,
    /// Usable, with a caveat in the text.
    Look,
    /// Absent; only features that need it are unavailable.
    Absent,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let options = CpuOptions::from_env()?;
    let found = cuda::probe();
    if args.json {
        println!("{:#}", as_json(args, options, &found));
        return Ok(ExitCode::SUCCESS);
    }
    let mut findings = vec![processor(options), memory(), disk(&args.out, machine::free_disk(&args.out))];
    findings.extend(gpus(&found));
    findings.extend(links(&found));
    findings.push(rank());
    findings.push(sandbox());
    for Finding { name, status, text } in findings {
        let status = match status {
            Status::Good => "ok",
            Status::Look => "look",
            Status::Absent => "none",
        };
        println!("{name:<9} {status:<5} {}", text.replace('\n', &format!("\n{:<15} ", "")));
    }
    println!("\nThe CPU is enough for the built-in run: stapo train");
    Ok(ExitCode::SUCCESS)
}

fn processor(options: CpuOptions) -> Finding {
    let name = machine::processor().unwrap_or_else(|| std::env::consts::ARCH.to_string());
    let levels: Vec<&str> = Simd::available().into_iter().map(Simd::name).collect();
    let threads =
        if options.threads == 1 { "1 thread".to_string() } else { format!("{} threads", options.threads) };
    let text =
        format!("{name}, {threads}\ninstructions: {} (in use: {})", levels.join(", "), options.simd.name());
    let is_slow = options.simd == Simd::Scalar;
    let status = if is_slow { Status::Look } else { Status::Good };
    Finding {
        name: "cpu",
        status,
        text: if is_slow { format!("{text}\nno vector instructions in use: training is slow") } else { text },
    }
}

fn memory() -> Finding {
    let text = HostMemory::find().map_or("unknown on this system".to_string(), |memory| {
        format!("{} of {} available", size(memory.available), size(memory.total))
    });
    Finding { name: "memory", status: Status::Good, text }
}

/// The disk of the folder where runs will be written, with so many bytes free.
fn disk(out: &Path, free: Option<u64>) -> Finding {
    let name = "disk";
    match free {
        Some(free) if free < LITTLE_DISK => {
            let text = format!(
                "{} free for {}\na run keeps checkpoints: free some space",
                size(free),
                out.display()
            );
            Finding { name, status: Status::Look, text }
        }
        Some(free) => {
            Finding { name, status: Status::Good, text: format!("{} free for {}", size(free), out.display()) }
        }
        None => Finding { name, status: Status::Look, text: format!("unknown for {}", out.display()) },
    }
}

fn gpus(found: &Found) -> Vec<Finding> {
    let mut lines: Vec<Finding> = found
        .gpus
        .iter()
        .map(|gpu| {
            let (major, minor) = gpu.compute_capability;
            // The kernels for adapters are Hopper's; others are exact at multiples of 8 only.
            let ranks = if (major, minor) == (9, 0) { "any rank to 128" } else { "ranks that are multiples of 8" };
            let text = format!(
                "{}, {}, compute capability {major}.{minor}, {} multiprocessors\nadapters (model.lora): {ranks}, on a base in bf16 or quantised",
                gpu.name,
                size(gpu.memory_bytes as u64),
                gpu.multiprocessors
            );
            Finding { name: "gpu", status: Status::Good, text }
        })
        .collect();
    if let Some((major, minor)) = found.driver {
        lines.push(Finding { name: "driver", status: Status::Good, text: format!("CUDA {major}.{minor}") });
    }
    for (name, part) in [("nvrtc", &found.nvrtc), ("cublaslt", &found.cublaslt)] {
        lines.push(match part {
            FoundLibrary::Version(version) => Finding { name, status: Status::Good, text: version.clone() },
            FoundLibrary::Missing { package } => {
                Finding { name, status: Status::Absent, text: format!("pip install '{package}' brings it") }
            }
        });
    }
    if let Some(obstacle) = found.obstacle() {
        lines.push(Finding { name: "gpu", status: Status::Absent, text: obstacle });
    }
    lines
}

/// What several GPUs need to train together. A machine with one GPU may still be one of several machines.
fn links(found: &Found) -> Vec<Finding> {
    let nccl = match &found.nccl {
        FoundLibrary::Version(version) => {
            Finding { name: "nccl", status: Status::Good, text: version.clone() }
        }
        FoundLibrary::Missing { package } => Finding {
            name: "nccl",
            status: Status::Absent,
            text: format!("only several GPUs need it; pip install '{package}' brings it"),
        },
    };
    let n_gpus = found.gpus.len();
    let n_pairs = n_gpus * n_gpus.saturating_sub(1) / 2;
    if n_pairs == 0 {
        return vec![nccl];
    }
    let is_full = found.peers.len() == n_pairs;
    let text = format!(
        "{} of {n_pairs} pairs of GPUs read each other's memory directly{}",
        found.peers.len(),
        if is_full { "" } else { "\nthe others exchange through the host, which is slower" }
    );
    vec![nccl, Finding { name: "links", status: if is_full { Status::Good } else { Status::Look }, text }]
}

/// What the environment makes of a process that would train here.
fn rank() -> Finding {
    let name = "rank";
    match Membership::find(&Flags::default()) {
        Ok(None) => {
            let text = "a process here trains alone; stapo launch starts several".to_string();
            Finding { name, status: Status::Good, text }
        }
        Ok(Some(membership)) => {
            let Membership { rank, world, local_rank, n_local, address, port, token } = membership;
            let open = if token.is_empty() {
                format!("\nwhoever reaches that port can join: give all ranks the same secret in {TOKEN}")
            } else {
                String::new()
            };
            let text = format!(
                "{rank} of {world}, number {local_rank} of {n_local} on this machine; rank 0 is at {address}:{port}{open}"
            );
            Finding { name, status: if token.is_empty() { Status::Look } else { Status::Good }, text }
        }
        Err(error) => Finding { name, status: Status::Look, text: error.to_string() },
    }
}

/// What keeps programs of a model apart on this machine.
fn sandbox() -> Finding {
    let name = "sandbox";
    let layers = match CodeJudge::open(&CodeSpec::default()) {
        Ok(judge) => judge.layers().clone(),
        Err(error) => return Finding { name, status: Status::Absent, text: error.to_string() },
    };
    let landlock = if layers.has_landlock { "Landlock" } else { "no Landlock" };
    match layers.without_namespaces {
        None => Finding {
            name,
            status: Status::Good,
            text: format!("programs of a model run in namespaces, with seccomp and {landlock}"),
        },
        Some(problem) => Finding {
            name,
            status: Status::Look,
            text: format!(
                "programs of a model run with seccomp and {landlock}\nnot in namespaces: {problem}"
            ),
        },
    }
}

fn sandbox_as_json() -> serde_json::Value {
    match CodeJudge::open(&CodeSpec::default()) {
        Ok(judge) => json!(judge.layers()),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

fn rank_as_json() -> serde_json::Value {
    match Membership::find(&Flags::default()) {
        Ok(None) => serde_json::Value::Null,
        Ok(Some(membership)) => json!({
            "rank": membership.rank,
            "world": membership.world,
            "local_rank": membership.local_rank,
            "ranks_here": membership.n_local,
            "master": format!("{}:{}", membership.address, membership.port),
            "has_token": !membership.token.is_empty(),
        }),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

fn as_json(args: &Args, options: CpuOptions, found: &Found) -> serde_json::Value {
    let part = |part: &FoundLibrary| match part {
        FoundLibrary::Version(version) => json!({"version": version}),
        FoundLibrary::Missing { package } => json!({"package": package}),
    };
    let memory = HostMemory::find();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "processor": machine::processor(),
        "threads": options.threads,
        "simd": options.simd.name(),
        "memory_bytes": memory.map(|m| m.total),
        "memory_available_bytes": memory.map(|m| m.available),
        "disk_free_bytes": machine::free_disk(&args.out),
        "driver": found.driver.map(|(major, minor)| format!("{major}.{minor}")),
        "gpus": found.gpus.iter().map(|gpu| json!({
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "compute_capability": format!("{}.{}", gpu.compute_capability.0, gpu.compute_capability.1),
            "multiprocessors": gpu.multiprocessors,
        })).collect::<Vec<_>>(),
        "nvrtc": part(&found.nvrtc),
        "cublaslt": part(&found.cublaslt),
        "nccl": part(&found.nccl),
        "gpu_peers": found.peers,
        "rank": rank_as_json(),
        "sandbox": sandbox_as_json(),
        "gpu_obstacle": found.obstacle(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_rl::device::cuda::Gpu;

    fn found(n_gpus: usize, peers: &[(usize, usize)]) -> Found {
        let gpu = Gpu {
            name: "H200".into(),
            memory_bytes: 3 << 30,
            compute_capability: (9, 0),
            multiprocessors: 132,
        };
        let version = |text: &str| FoundLibrary::Version(text.into());
        Found {
            driver: Some((13, 0)),
            driver_error: None,
            gpus: vec![gpu; n_gpus],
            nvrtc: version("12.9"),
            cublaslt: version("12.9.1"),
            nccl: FoundLibrary::Missing { package: "nvidia-nccl" },
            peers: peers.to_vec(),
        }
    }

    #[test]
    fn a_processor_without_vector_instructions_is_named() {
        let looked = |threads, simd| {
            let found = processor(CpuOptions { threads, simd });
            (found.status, found.text.contains(&format!("in use: {}", simd.name())), found.text)
        };
        let (status, is_named, text) = looked(1, Simd::Scalar);
        assert_eq!((status, is_named), (Status::Look, true));
        assert!(text.contains(", 1 thread\n") && text.ends_with("training is slow"), "{text}");
        let (status, is_named, text) = looked(2, Simd::Avx2);
        assert_eq!((status, is_named), (Status::Good, true));
        assert!(text.contains(", 2 threads\n") && !text.contains("slow"), "{text}");
    }

    /// Three GPUs are three pairs.
    #[test]
    fn links_between_gpus_are_counted_by_pairs() {
        let lines = |found: &Found| -> Vec<(&'static str, Status, String)> {
            links(found).into_iter().map(|line| (line.name, line.status, line.text)).collect()
        };
        let nccl = "only several GPUs need it; pip install 'nvidia-nccl' brings it";
        assert_eq!(lines(&found(1, &[])), [("nccl", Status::Absent, nccl.to_string())]);
        let text = |n: usize| format!("{n} of 3 pairs of GPUs read each other's memory directly");
        let all = lines(&found(3, &[(0, 1), (0, 2), (1, 2)]));
        assert_eq!(all[1], ("links", Status::Good, text(3)));
        let some = lines(&found(3, &[(0, 1)]));
        let slower = "\nthe others exchange through the host, which is slower";
        assert_eq!(some[1], ("links", Status::Look, text(1) + slower));
    }

    #[test]
    fn a_disk_has_room_from_one_gibibyte_on() {
        let found = |free: Option<u64>| {
            let Finding { name, status, text } = disk(Path::new("runs"), free);
            assert_eq!(name, "disk");
            (status, text)
        };
        assert_eq!(found(Some(1 << 30)), (Status::Good, "1.0 GiB free for runs".to_string()));
        let (status, text) = found(Some((1 << 30) - 1));
        assert_eq!(status, Status::Look);
        assert!(text.starts_with("1024.0 MiB free for runs\n") && text.contains("free some space"), "{text}");
        assert_eq!(found(None), (Status::Look, "unknown for runs".to_string()));
    }

    #[test]
    fn gpus_and_libraries_have_a_line_each() {
        let lines = |found: &Found| -> Vec<(&'static str, Status, String)> {
            gpus(found).into_iter().map(|line| (line.name, line.status, line.text)).collect()
        };
        let mut here = found(1, &[]);
        let text = "H200, 3.0 GiB, compute capability 9.0, 132 multiprocessors\nadapters (model.lora): any rank to 128, on a base in bf16 or quantised";
        let [gpu, driver, nvrtc, cublaslt] = &lines(&here)[..] else { panic!("four lines") };
        assert_eq!(gpu, &("gpu", Status::Good, text.to_string()));
        assert_eq!(driver, &("driver", Status::Good, "CUDA 13.0".to_string()));
        assert_eq!(nvrtc, &("nvrtc", Status::Good, "12.9".to_string()));
        assert_eq!(cublaslt, &("cublaslt", Status::Good, "12.9.1".to_string()));
        here.gpus[0].compute_capability = (8, 0);
        here.nvrtc = FoundLibrary::Missing { package: "nvidia-nvrtc" };
        let without = lines(&here);
        assert!(
            without[0].2.contains("capability 8.0,")
                && without[0].2.contains("ranks that are multiples of 8")
        );
        let missing = ("nvrtc", Status::Absent, "pip install 'nvidia-nvrtc' brings it".to_string());
        assert_eq!(without[2], missing);
        let last = without.last().unwrap();
        assert_eq!((last.0, last.1), ("gpu", Status::Absent), "what keeps the GPU from use has a line too");
    }

    #[test]
    fn the_report_as_json_has_the_numbers_in_bytes() {
        let args = Args { out: "runs".into(), json: true };
        let options = CpuOptions { threads: 3, simd: Simd::Scalar };
        let report = as_json(&args, options, &found(2, &[(0, 1)]));
        assert_eq!((&report["threads"], &report["simd"]), (&json!(3), &json!(Simd::Scalar.name())));
        let gpu = json!({"name": "H200", "memory_bytes": 3u64 << 30, "compute_capability": "9.0", "multiprocessors": 132});
        assert_eq!(report["gpus"], json!([gpu, gpu]));
        assert_eq!((&report["driver"], &report["gpu_peers"]), (&json!("13.0"), &json!([[0, 1]])));
        assert_eq!(report["nvrtc"], json!({"version": "12.9"}));
        assert_eq!(report["cublaslt"], json!({"version": "12.9.1"}));
        assert_eq!(report["nccl"], json!({"package": "nvidia-nccl"}));
        if let Some(total) = report["memory_bytes"].as_u64() {
            assert!(report["memory_available_bytes"].as_u64().unwrap() <= total, "{report}");
        }
    }
}

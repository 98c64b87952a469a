//! The environment variables that the program reads.

use super::{Entry, Page, Section};

const INTRO: &str = "\
An option of the command line overrides a variable. Only `STAPO_RANKS_TRANSPORT` and the variables that place ranks must be the \
same on all machines of a run. No variable changes a result.";

const VARIABLES: [(&str, &[(&str, &str)]); 4] = [
    (
        "This program",
        &[
            ("STAPO_THREADS", "Threads on the CPU; all cores by default."),
            (
                "STAPO_SIMD",
                "Instruction set of the CPU: `scalar`, `avx2`, `avx512` or `neon`; the best by default.",
            ),
            (
                "STAPO_CUDA_LIBRARIES",
                "Folders with NVRTC, cuBLASLt and NCCL, searched first, separated as in `PATH`.",
            ),
            (
                "STAPO_KERNEL_CACHE",
                "Folder of compiled GPU kernels; by default `stapo/kernels` in the user's cache.",
            ),
            ("NO_COLOR", "No colours on the terminal."),
            ("CLICOLOR_FORCE", "Colours although the output is not a terminal."),
            (
                "XDG_STATE_HOME",
                "Where the program keeps the list of verifier programs that you have allowed; by default `~/.local/state`.",
            ),
            ("XDG_CACHE_HOME", "The user's cache; by default `~/.cache`."),
        ],
    ),
    (
        "Models and data from the Hugging Face hub",
        &[
            ("HF_TOKEN", "Token for gated and private repositories."),
            ("HF_ENDPOINT", "Another address of the hub, such as a mirror."),
            ("HF_HOME", "Folder of Hugging Face's files; the cache is `hub` in it."),
            ("HF_HUB_CACHE", "Folder of fetched files, as for Hugging Face's programs."),
            (
                "HF_HUB_DOWNLOAD_TIMEOUT",
                "Seconds without a byte after which a transfer is tried again from where it broke off.",
            ),
        ],
    ),
    (
        "GPUs",
        &[
            ("CUDA_VISIBLE_DEVICES", "The GPUs that the program sees, as CUDA reads it."),
            ("CUDA_HOME", "Folder of a CUDA toolkit, searched for libraries."),
            ("CUDA_PATH", "The same, under its other name."),
            ("VIRTUAL_ENV", "A Python environment, searched for NVIDIA's libraries from PyPI."),
        ],
    ),
    (
        "Several processes",
        &[
            ("STAPO_RANKS_TOKEN", "The secret that the processes of a run share."),
            (
                "STAPO_RANKS_START_TIMEOUT",
                "Seconds that ranks wait for each other at the start; 300 by default.",
            ),
            (
                "STAPO_RANKS_TIMEOUT",
                "Seconds without a sign of life after which a rank counts as lost; 10 by default.",
            ),
            (
                "STAPO_RANKS_TRANSPORT",
                "`tcp` sends numbers between GPUs through the hosts instead of NCCL, with the same bits.",
            ),
            ("RANK", "Number of this process, as `torchrun` sets it; so are the next five."),
            ("WORLD_SIZE", "Number of processes."),
            ("LOCAL_RANK", "Number of this process on its machine."),
            ("LOCAL_WORLD_SIZE", "Number of processes on this machine."),
            ("MASTER_ADDR", "Address of the machine of rank 0."),
            ("MASTER_PORT", "Port of rank 0."),
            (
                "SLURM_PROCID",
                "Slurm's number of this process; the other variables of a Slurm step are read too.",
            ),
            ("OMPI_COMM_WORLD_RANK", "Open MPI's number of this process; `PMI_RANK` for other MPIs."),
            ("JOB_COMPLETION_INDEX", "Number of this process in a Kubernetes indexed job."),
        ],
    ),
];

pub fn page() -> Page {
    let section = |(title, variables): &(&str, &[(&str, &str)])| {
        let rows = variables.iter().map(|(name, about)| Entry::new("environment variable", *name, *about));
        Section { title: (*title).to_string(), rows: rows.collect(), ..Section::default() }
    };
    let sections = VARIABLES.iter().map(section).collect();
    Page { file: "environment.md", title: "Environment variables", intro: INTRO, sections }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    /// Variables of builds, tests and processes that the program starts itself.
    const INTERNAL: [&str; 9] = [
        "STAPO_COMMIT",
        "STAPO_PROFILE",
        "STAPO_TARGET",
        "STAPO_WRITE_DOCS",
        "STAPO_WRITE_GOLDENS",
        "STAPO_NO_ROOM",
        "STAPO_DISK_FAULT",
        "STAPO_DISK_TRACE",
        "STAPO_LAUNCHED",
    ];

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn every_variable_that_the_program_reads_is_listed() {
        let mut files = Vec::new();
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for name in ["stapo-core", "stapo-ops", "stapo-model", "stapo-sandbox", "stapo-rl", "stapo-cli"] {
            sources(&crates.join(name).join("src"), &mut files);
        }
        let listed: Vec<&str> = VARIABLES.iter().flat_map(|(_, rows)| *rows).map(|(name, _)| *name).collect();
        let mut n_read = 0;
        for path in files {
            let text = std::fs::read_to_string(&path).unwrap();
            for quoted in text.split('"').filter(|text| text.starts_with("STAPO_") || text.starts_with("HF_"))
            {
                n_read += 1;
                let is_known = listed.contains(&quoted) || INTERNAL.contains(&quoted);
                let is_name = quoted.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
                    && !quoted.ends_with('_');
                assert!(is_known || !is_name, "{quoted} of {} is not in the reference", path.display());
            }
        }
        assert!(n_read > 20, "{n_read} names found");
    }
}

//! `stapo version`

use crate::shared::program::PROGRAM;
use serde_json::json;
use stapo_rl::device::cuda;
use std::process::ExitCode;

/// Prints version, commit and build of this program, and whether it can use a GPU.
#[derive(clap::Args)]
pub struct Args {
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> ExitCode {
    let found = cuda::probe();
    let obstacle = found.obstacle();
    if args.json {
        let text = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "commit": env!("STAPO_COMMIT"),
            "profile": env!("STAPO_PROFILE"),
            "target": env!("STAPO_TARGET"),
            "gpus": found.gpus.iter().map(|gpu| gpu.name.clone()).collect::<Vec<_>>(),
            "gpu_obstacle": obstacle,
        });
        println!("{text:#}");
        return ExitCode::SUCCESS;
    }
    println!("stapo    {PROGRAM}");
    println!("build    {}, {}", env!("STAPO_PROFILE"), env!("STAPO_TARGET"));
    match obstacle {
        None => found.gpus.iter().for_each(|gpu| println!("gpu      {}", gpu.name)),
        Some(_) => println!("gpu      none usable; stapo doctor says why"),
    }
    ExitCode::SUCCESS
}

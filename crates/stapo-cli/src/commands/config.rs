//! `stapo config`

use anyhow::{Result, bail};
use clap::ValueEnum;
use stapo_rl::Config;
use stapo_rl::lab::experiment::ExperimentSpec;
use stapo_rl::learn::pretrain::PretrainConfig;
use stapo_rl::plan::config::schema;
use std::process::ExitCode;

/// Describes the keys of config files as a JSON Schema, for editors and tools.
///
/// Every key has its type, its default and a description. In an editor that reads schemas of TOML files, the first line
/// of a config names it: #:schema ./stapo.schema.json
#[derive(clap::Args)]
pub struct Args {
    /// Prints the schema.
    #[arg(long)]
    schema: bool,

    /// Which files the schema is for.
    #[arg(long, value_enum, default_value_t = Kind::Train)]
    kind: Kind,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// Files of stapo train.
    Train,
    /// Files of stapo sft, stapo prefer, stapo rm and stapo pretrain.
    Sft,
    /// Files of stapo experiment.
    Experiment,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if !args.schema {
        bail!(
            "config: nothing to do\nhint: --schema prints the keys; stapo plan CONFIG shows the values of a config"
        );
    }
    let schema = match args.kind {
        Kind::Train => schema::<Config>(),
        Kind::Sft => schema::<PretrainConfig>(),
        Kind::Experiment => schema::<ExperimentSpec>(),
    };
    println!("{}", serde_json::to_string_pretty(&schema)?);
    Ok(ExitCode::SUCCESS)
}

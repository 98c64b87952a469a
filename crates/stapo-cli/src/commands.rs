//! The commands of the binary: each is a file or folder with an `Args` and a `run`.

pub mod completions;
pub mod config;
pub mod counterfactual;
pub mod doctor;
pub mod eval;
pub mod experiment;
pub mod export;
pub mod fetch;
pub mod generate;
pub mod grade;
pub mod init;
pub mod inspect;
pub mod launch;
pub mod man;
pub mod model;
pub mod objective;
pub mod plan;
pub mod pretrain;
pub mod problems;
pub mod report;
pub mod runs;
pub mod score;
pub mod serve;
pub mod train;
pub mod verify;
pub mod version;

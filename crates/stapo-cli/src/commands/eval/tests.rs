//! The command line of `stapo eval`.

use super::*;
use clap::{CommandFactory, Parser};

#[derive(Parser)]
struct Given {
    #[command(flatten)]
    args: Args,
}

/// What a process decides again each time; everything else is in the folder of the evaluation.
const OF_THE_PROCESS: [&str; 12] = [
    "resume",
    "accept_changes",
    "allow_command",
    "base",
    "device",
    "fetch",
    "json",
    "local_rank",
    "master",
    "rank",
    "threads",
    "world",
];

#[test]
fn a_resumed_evaluation_takes_no_flag_that_its_folder_has() {
    let command = Given::command();
    let is_of_process = |id: &str| OF_THE_PROCESS.contains(&id) || ["help", "version"].contains(&id);
    let kept = command.get_arguments().filter(|arg| !is_of_process(arg.get_id().as_str()));
    let mut n_kept = 0;
    for arg in kept {
        let flag = format!("--{}", arg.get_long().unwrap());
        let value = match arg.get_id().as_str() {
            _ if !arg.get_action().takes_values() => "",
            "chat" => "=true",
            "chat_arguments" => "={}",
            _ => "=1",
        };
        let words = ["eval", "--resume", "folder", &format!("{flag}{value}")];
        let error = Given::try_parse_from(words).err().unwrap_or_else(|| panic!("{flag} is taken"));
        assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict, "{flag}: {error}");
        n_kept += 1;
    }
    assert_eq!(n_kept, OF_THE_FOLDER.len());
    assert!(Given::try_parse_from(["eval", "--resume", "folder", "--json", "--threads", "2"]).is_ok());
}

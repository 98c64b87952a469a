//! Commands and options, from the command line that clap parses.

use super::{Entry, Page, Section};
use crate::help::EXIT_STATUS;
use clap::{Arg, Command};

pub const COMMAND: &str = "command";
pub const OPTION: &str = "option";

const INTRO: &str = "\
`stapo --help` lists the commands by task, and `stapo COMMAND --help` prints what this page has on one of them. [Input and output \
of commands](../commands.md) describes the lines that commands read and write, [Environment variables](environment.md) what they \
read besides.";

pub fn page(program: &Command) -> Page {
    let mut program = program.clone();
    program.build();
    let statuses = Section {
        title: "Exit status".to_string(),
        intro: EXIT_STATUS.trim_start_matches("Exit status: ").replace('\n', " "),
        ..Section::default()
    };
    let shared: Vec<Entry> = program.get_arguments().filter(|arg| arg.is_global_set()).map(option).collect();
    let shared = Section { title: "Options of all commands".to_string(), rows: shared, ..Section::default() };
    let mut sections = vec![statuses, shared];
    add_commands(&mut program, &mut sections);
    Page { file: "commands.md", title: "Commands", intro: INTRO, sections }
}

/// Adds a section for each command below `command`, and for those below it.
fn add_commands(command: &mut Command, sections: &mut Vec<Section>) {
    let shown = |below: &&mut Command| !below.is_hide_set() && below.get_name() != "help";
    for below in command.get_subcommands_mut().filter(shown) {
        sections.push(section(below));
        add_commands(below, sections);
    }
}

fn section(command: &mut Command) -> Section {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_string();
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    let usage = command.render_usage().to_string();
    let usage: Vec<String> =
        usage.trim_start_matches("Usage:").lines().map(|line| format!("`{}`", line.trim())).collect();
    let mut subject =
        Entry::new(COMMAND, &name, about.unwrap_or_default()).with_fact("usage", usage.join(" or "));
    subject.aliases = vec![name.trim_start_matches("stapo ").to_string()];
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples: Vec<&str> = examples.lines().skip(1).map(str::trim).collect();
    let intro = if examples.is_empty() {
        String::new()
    } else {
        format!("```sh example\n{}\n```", examples.join("\n"))
    };
    let is_listed = |arg: &&Arg| {
        !arg.is_hide_set() && !arg.is_global_set() && !matches!(arg.get_id().as_str(), "help" | "version")
    };
    let rows = command.get_arguments().filter(is_listed).map(option).collect();
    Section { title: name, subject: Some(subject), intro, rows, ..Section::default() }
}

/// An option, or a positional argument.
fn option(arg: &Arg) -> Entry {
    let long = arg.get_long().map(|name| format!("--{name}"));
    let short = arg.get_short().map(|letter| format!("-{letter}"));
    let flags: Vec<String> = short.into_iter().chain(long).collect();
    let values = arg.get_value_names().filter(|_| arg.get_action().takes_values()).unwrap_or_default();
    let values: Vec<&str> = values.iter().map(clap::builder::Str::as_str).collect();
    let name = [flags.join(", "), values.join(" ")].join(" ").trim().to_string();
    let default: Vec<String> =
        arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    let known = arg.get_possible_values();
    let known = known.iter().filter(|value| !value.is_hide_set() && arg.get_action().takes_values());
    let known: Vec<String> = known
        .map(|value| {
            let about = value.get_help().map(|about| format!(": {about}")).unwrap_or_default();
            format!("`{}`{about}", value.get_name())
        })
        .collect();
    let about = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let default = if arg.get_action().takes_values() { default.join(", ") } else { String::new() };
    let mut entry =
        Entry::new(OPTION, name, about).with_fact("default", default).with_fact("values", known.join("\n\n"));
    entry.aliases = flags;
    entry
}

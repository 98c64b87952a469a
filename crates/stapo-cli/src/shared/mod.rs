//! Modules that two or more commands use.

pub mod allow_command;
pub mod chart;
pub mod clock;
pub mod html;
pub mod input;
pub mod machine;
pub mod option;
pub mod page;
pub mod program;
pub mod prompts;
pub mod run_folder;
pub mod run_status;
pub mod stop;
pub mod study;
pub mod terminal;
pub mod units;
pub mod viewer;

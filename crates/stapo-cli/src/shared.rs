//! Modules that two or more commands use.

pub mod allow_command;
pub mod chart;
pub mod clock;
pub mod discover;
pub mod html;
pub mod hub;
pub mod input;
pub mod machine;
pub mod model;
pub mod notes;
pub mod option;
pub mod page;
pub mod program;
pub mod prompts;
pub mod ranks;
pub mod run_folder;
pub mod run_status;
pub mod shipped;
pub mod stop;
pub mod study;
pub mod tensorboard;
pub mod terminal;
pub mod units;
pub mod viewer;

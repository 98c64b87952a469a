//! What two or more commands share.

pub mod chart;
pub mod clock;
pub mod input;
pub mod language;
pub mod machine;
pub mod option;
pub mod page;
pub mod run_folder;
pub mod stop;
pub mod units;

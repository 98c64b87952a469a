//! The tests of the program, in one executable: it is linked once, and tests of different files run side by side. Every file
//! is a module here, which `house.rs` checks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "tests print what they tried and why they skip")]

mod browser;
mod checkpoints;
mod cluster;
mod code;
mod command;
mod common;
mod counterfactual;
mod data;
mod docs;
mod environments;
mod eval;
mod export;
mod fetch;
mod first_contact;
mod first_hour;
mod forgery;
mod grade;
mod hostile_input;
mod house;
mod hybrid;
mod identity;
mod init_from;
mod judge;
mod language;
mod layout;
mod messages;
mod model;
mod mutated_runs;
mod objective;
mod pages;
mod permission;
mod pinned;
mod plan;
mod preferences;
mod programs;
mod python_reward;
mod ranks;
mod receipt;
mod reward_models;
mod scripts;
mod serve;
mod serve_access;
mod serve_compare;
mod served_runs;
mod stopping;
mod survival;
mod sweep;
mod terminal;
mod tools;
mod train;
mod transcript;
mod trust;
mod writer;

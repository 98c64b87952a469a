//! The executable `stapo`; the program itself is the library next to it.

fn main() -> std::process::ExitCode {
    stapo_cli::main()
}

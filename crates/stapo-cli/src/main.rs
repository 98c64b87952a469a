//! The executable `stapo`; the program itself is the library beside it.

fn main() -> std::process::ExitCode {
    stapo_cli::main()
}

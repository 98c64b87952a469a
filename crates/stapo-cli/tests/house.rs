//! The rules of the house, checked on the source: which crate may import which, where `unsafe` may stand, how long
//! files and functions may be, how many arguments they take, that modules import each other in one direction, and that no
//! file of tests is forgotten.

mod modules;
mod source;

use crate::common::root;
use modules::Imports;
use source::{Function, code_only, cuda_functions, has_word, rust_functions};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The table of ARCHITECTURE.md: a crate and the crates of ours it may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("stapo-core", &[]),
    ("stapo-verify", &[]),
    ("stapo-ops", &[]),
    ("stapo-model", &["stapo-ops"]),
    ("stapo-sandbox", &[]),
    ("stapo-rl", &["stapo-core", "stapo-verify", "stapo-model", "stapo-sandbox"]),
    ("stapo-cli", &["stapo-core", "stapo-verify", "stapo-rl"]),
    ("stapo-py", &["stapo-core", "stapo-verify", "stapo-rl", "stapo-cli"]),
];

const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 80;
const MAX_ARGUMENTS: usize = 7;
const MAX_KERNEL_PARAMETERS: usize = 12;

/// Findings that may stay, as the tests print them without their numbers, each with a reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("crates/stapo-py/src/grade.rs grade", "the keyword arguments of a Python function"),
    ("crates/stapo-py/src/grade.rs grade_batch", "the keyword arguments of a Python function"),
];

/// Source files below a folder, build output aside.
fn sources(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(sources(&path, extensions));
        } else if path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_string_lossy().into_owned()
}

/// The name of each crate with its folder.
fn crates() -> Vec<(String, PathBuf)> {
    let folders = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        folders.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path)).collect();
    found.sort();
    assert!(found.len() >= 6, "{} crates found", found.len());
    found
}

/// Fails on findings that are no exceptions. A finding begins with what it is about; after a colon stand its numbers.
fn assert_none(rule: &str, findings: &[String]) {
    let subject = |finding: &str| finding.split(": ").next().unwrap_or_default().to_string();
    let is_exception = |finding: &&String| EXCEPTIONS.iter().any(|(known, _)| *known == subject(finding));
    let unexplained: Vec<&str> = findings.iter().filter(|f| !is_exception(f)).map(String::as_str).collect();
    println!(
        "{rule}: {} findings, {} of them exceptions",
        findings.len(),
        findings.len() - unexplained.len()
    );
    assert!(unexplained.is_empty(), "{rule}:\n{}", unexplained.join("\n"));
}

/// Crates of ours that a manifest names, in any dependency table and under any target.
fn imports(manifest: &toml::Table) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in manifest {
        let Some(table) = value.as_table() else { continue };
        if key.ends_with("dependencies") {
            let package = |(name, spec): (&String, &toml::Value)| {
                spec.get("package").and_then(toml::Value::as_str).unwrap_or(name).to_string()
            };
            found.extend(table.iter().map(package).filter(|name| name.starts_with("stapo")));
        } else {
            found.extend(imports(table));
        }
    }
    found
}

#[test]
fn crates_import_only_what_the_design_allows() {
    let allowed: BTreeMap<_, _> = MAY_IMPORT.iter().copied().collect();
    for (_, folder) in crates() {
        let table: toml::Table = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        let name = table["package"]["name"].as_str().unwrap().to_string();
        let may =
            allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not in the table of crates"));
        for import in imports(&table) {
            assert!(may.contains(&import.as_str()), "{name} imports {import}; it may import {may:?}");
        }
    }
}

/// Crates of ours that the code of a crate names without permission, and re-exports of a whole crate of ours, which
/// would open that crate to every crate above.
fn upward_imports(crate_name: &str, code: &str) -> Vec<String> {
    let may = MAY_IMPORT.iter().find(|(name, _)| *name == crate_name).map_or(&[][..], |(_, may)| *may);
    let statements = code.split([';', '{', '}']).map(str::trim);
    let handed_on: Vec<&str> =
        statements.filter_map(|statement| statement.strip_prefix("pub use ")).collect();
    let mut found = Vec::new();
    for (other, _) in MAY_IMPORT {
        let path = other.replace('-', "_");
        if *other != crate_name && !may.contains(other) && has_word(code, &path) {
            found.push(format!("names {path}"));
        }
        for target in &handed_on {
            let target = target.trim_start_matches("::");
            let rest = target.strip_prefix(&path).unwrap_or("::");
            if rest.is_empty() || rest.starts_with(" as ") || rest == "::*" {
                found.push(format!("hands on all of {path}"));
            }
        }
    }
    if code.contains("stapo_rl::model::") {
        found.push("reaches the model past the facade of stapo-rl".to_string());
    }
    found
}

#[test]
fn no_import_runs_upward() {
    assert_eq!(upward_imports("stapo-model", "use stapo_rl::Plan;"), ["names stapo_rl"]);
    assert_eq!(upward_imports("stapo-cli", "use stapo_ops::Device;"), ["names stapo_ops"]);
    assert_eq!(upward_imports("stapo-rl", "pub use stapo_model as model;"), ["hands on all of stapo_model"]);
    assert_eq!(upward_imports("stapo-rl", "pub use stapo_model::*;"), ["hands on all of stapo_model"]);
    assert_eq!(upward_imports("stapo-rl", "pub use stapo_model::Device; use stapo_core::Batch;"), [""; 0]);
    let mut findings = Vec::new();
    for (name, folder) in crates() {
        for path in sources(&folder, &["rs"]) {
            let code = code_only(&fs::read_to_string(&path).unwrap());
            let found = upward_imports(&name, &code);
            findings.extend(found.iter().map(|what| format!("{}: {what}", relative(&path))));
        }
    }
    assert_none("imports that run upward", &findings);
}

#[test]
fn unsafe_stands_in_one_crate_only() {
    assert!(has_word(&code_only("fn f() { unsafe { g() } }"), "unsafe"));
    let prose = "// unsafe\nlet s = \"unsafe \\\" unsafe\"; r#\"unsafe\"#; '\"'; /* unsafe */";
    assert!(!has_word(&code_only(prose), "unsafe"));
    let findings: Vec<String> = sources(&root().join("crates"), &["rs"])
        .into_iter()
        .filter(|path| !path.starts_with(root().join("crates/stapo-ops")))
        .filter(|path| has_word(&code_only(&fs::read_to_string(path).unwrap()), "unsafe"))
        .map(|path| relative(&path))
        .collect();
    assert_none("unsafe outside stapo-ops", &findings);
}

/// Inside Python the running executable is the interpreter, so only `restart` may ask for it.
#[test]
fn only_restart_names_the_running_executable() {
    let is_source = |path: &PathBuf| path.components().any(|part| part.as_os_str() == "src");
    let findings: Vec<String> = sources(&root().join("crates"), &["rs"])
        .into_iter()
        .filter(|path| is_source(path) && !path.ends_with("stapo-rl/src/run/restart.rs"))
        .filter(|path| has_word(&code_only(&fs::read_to_string(path).unwrap()), "current_exe"))
        .map(|path| format!("{}: start the program by stapo_rl::run::restart::command", relative(&path)))
        .collect();
    assert_none("programs that start themselves by their executable", &findings);
}

#[test]
fn a_module_is_a_file_beside_its_folder() {
    let all = sources(&root().join("crates"), &["rs"]);
    let old_style: Vec<String> =
        all.iter().filter(|path| path.ends_with("mod.rs")).map(|path| relative(path)).collect();
    assert_none("mod.rs files: write x.rs beside x/", &old_style);
}

#[test]
fn the_training_system_has_at_most_20_entries() {
    let entries = fs::read_dir(root().join("crates/stapo-rl/src")).unwrap().count();
    println!("stapo-rl/src: {entries} entries");
    assert!(
        entries <= 20,
        "stapo-rl/src has {entries} entries: move a module into one of the rooms that lib.rs lists"
    );
}

/// Functions and variables whose whole name is a word that names nothing.
fn empty_names(code: &str) -> Vec<String> {
    let words: Vec<&str> =
        code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
    let named = words.windows(3).filter_map(|three| match three {
        ["fn", name, _] | ["let", "mut", name] => Some(*name),
        ["let", name, _] if *name != "mut" => Some(*name),
        _ => None,
    });
    named
        .filter(|name| ["own", "of", "over", "beside", "place", "told"].contains(name))
        .map(String::from)
        .collect()
}

#[test]
fn names_say_the_thing() {
    assert_eq!(
        empty_names("fn of(x: u8) { let mut own = 1; let place = x; let (of, b) = f(of_x); }"),
        ["of", "own", "place", "of"]
    );
    assert_eq!(empty_names("fn of_rank() { let owned = 1; let rank_of = over(2); }"), [""; 0]);
    let mut findings = Vec::new();
    for path in sources(&root().join("crates"), &["rs"])
        .iter()
        .filter(|path| path.components().any(|part| part.as_os_str() == "src"))
    {
        let found = empty_names(&code_only(&fs::read_to_string(path).unwrap()));
        findings.extend(found.iter().map(|name| format!("{}: {name}", relative(path))));
    }
    assert_none("names that say nothing", &findings);
}

#[test]
fn files_stay_below_500_lines() {
    let mut findings = Vec::new();
    for path in sources(&root(), &["rs", "cu", "py", "sh", "js"]) {
        let n_lines = fs::read_to_string(&path).unwrap().lines().count();
        if n_lines > MAX_FILE_LINES {
            findings.push(format!("{}: {n_lines} lines", relative(&path)));
        }
    }
    assert_none("files over 500 lines", &findings);
}

#[test]
fn scripts_of_pages_have_lines_of_at_most_120_columns() {
    let mut findings = Vec::new();
    for path in sources(&root().join("crates"), &["js"]) {
        let text = fs::read_to_string(&path).unwrap();
        for (idx, line) in text.lines().enumerate().filter(|(_, line)| line.chars().count() > 120) {
            findings.push(format!("{}:{}: {} columns", relative(&path), idx + 1, line.chars().count()));
        }
    }
    assert_none("lines of scripts over 120 columns", &findings);
}

fn too_long(functions: &[Function]) -> Vec<String> {
    let long = functions.iter().filter(|function| function.n_lines > MAX_FUNCTION_LINES);
    long.map(|function| format!("{}: {} lines", function.name, function.n_lines)).collect()
}

fn too_wide<'a>(functions: impl IntoIterator<Item = &'a Function>, most: usize) -> Vec<String> {
    let wide = functions.into_iter().filter(|function| function.n_arguments > most);
    wide.map(|function| format!("{}: {} arguments", function.name, function.n_arguments)).collect()
}

#[test]
fn functions_stay_below_80_lines_and_8_arguments() {
    let long = format!("fn long() -> [u8; 4] {{{}}}", "\n    let c = '}';".repeat(80));
    let found = rust_functions(&code_only(&long));
    assert_eq!(too_long(&found), ["long: 81 lines"]);
    let wide = "impl A { pub fn wide<F: Fn(u8) -> u8>(&mut self, a: (u8, u8), b: &[u8], c: Vec<(u8, u8)>, d: F, \
                e: u8, f: u8, g: u8, h: impl Fn(u8, u8) -> u8) where F: Copy {} fn narrow(a: fn(u8, u8)) {} }";
    let found = rust_functions(&code_only(wide));
    assert_eq!(too_wide(&found, MAX_ARGUMENTS), ["wide: 8 arguments"]);
    assert_eq!((found.len(), found[1].n_arguments), (2, 1));
    let mut findings = Vec::new();
    let mut n_functions = 0;
    for path in sources(&root().join("crates"), &["rs"]) {
        let functions = rust_functions(&code_only(&fs::read_to_string(&path).unwrap()));
        n_functions += functions.len();
        let found = [too_long(&functions), too_wide(&functions, MAX_ARGUMENTS)].concat();
        findings.extend(found.iter().map(|what| format!("{} {what}", relative(&path))));
    }
    println!("{n_functions} functions in Rust");
    assert!(n_functions > 1000, "{n_functions} functions found");
    assert_none("functions over 80 lines or 7 arguments", &findings);
}

#[test]
fn kernels_stay_below_80_lines_and_13_parameters() {
    let parameters = vec!["const float* x"; 13].join(", ");
    let planted = format!(
        "#define KERNEL extern \"C\" __global__ void\nstruct S {{ int a; }};\n\
         template <int N> __device__ float g(float a) {{ if (a > 0) {{ return f(a); }} return a; }}\n\
         KERNEL __launch_bounds__(128, 2) wide({parameters}) {{\n{}}}\n",
        "    x++;\n".repeat(80)
    );
    let found = cuda_functions(&code_only(&planted));
    assert_eq!(too_long(&found), ["wide: 82 lines"]);
    assert_eq!(too_wide(&found, MAX_KERNEL_PARAMETERS), ["wide: 13 arguments"]);
    assert_eq!((found.len(), found[0].name.as_str()), (2, "g"));
    let mut findings = Vec::new();
    let mut n_kernels = 0;
    for path in sources(&root().join("crates"), &["cu"]) {
        let functions = cuda_functions(&code_only(&fs::read_to_string(&path).unwrap()));
        let kernels: Vec<&Function> = functions.iter().filter(|function| function.is_kernel).collect();
        n_kernels += kernels.len();
        let found = [too_long(&functions), too_wide(kernels, MAX_KERNEL_PARAMETERS)].concat();
        findings.extend(found.iter().map(|what| format!("{} {what}", relative(&path))));
    }
    println!("{n_kernels} kernels");
    assert!(n_kernels > 30, "{n_kernels} kernels found");
    assert_none("kernels over 80 lines or 12 parameters", &findings);
}

#[test]
fn modules_of_a_crate_import_each_other_in_one_direction() {
    let file = |path: &str, text: &str| (path.to_string(), text.to_string());
    let planted = [
        file("main.rs", "mod a; mod b; mod c;"),
        file("a.rs", "use crate::{b::{self, x}, d::y}; use super::c as other;"),
        file("b.rs", "// use crate::a;\nfn f() { crate::c::g(\"crate::a\") }"),
        file("c.rs", "use crate::a::h;\n#[cfg(test)]\nmod tests { use crate::d; }"),
        file("d.rs", "use crate::b; use super::a;"),
        file("d/tests.rs", "use crate::d;"),
    ];
    assert_eq!(Imports::of(&planted).circles(), ["a, b, c, d"]);
    assert_eq!(Imports::of(&planted[1..3]).circles(), [""; 0]);
    let mut findings = Vec::new();
    for (name, folder) in crates() {
        let folder = folder.join("src");
        let below = |path: &PathBuf| path.strip_prefix(&folder).unwrap().to_string_lossy().into_owned();
        let files = sources(&folder, &["rs"]).into_iter();
        let files: Vec<_> = files.map(|path| (below(&path), fs::read_to_string(&path).unwrap())).collect();
        let imports = Imports::of(&files);
        let circles = imports.circles();
        println!("{name}: {} modules' imports, {} circles", imports.n_imports(), circles.len());
        findings.extend(circles.iter().map(|circle| format!("{name} {circle}")));
    }
    assert_none("circles of imports", &findings);
}

/// Names of files in a crate's folder of tests that no executable of tests holds: neither their own root, as the manifest
/// says, nor a module of a root.
fn tests_of_no_executable(manifest: &toml::Table, files: &[(String, String)]) -> Vec<String> {
    let is_found_by_cargo =
        manifest["package"].get("autotests").and_then(toml::Value::as_bool) != Some(false);
    if is_found_by_cargo {
        return Vec::new();
    }
    let targets = manifest.get("test").and_then(toml::Value::as_array);
    let is_root = |name: &str| {
        let path = format!("tests/{name}");
        targets.is_some_and(|targets| targets.iter().any(|target| target["path"].as_str() == Some(&path)))
    };
    let is_module = |name: &str| {
        let line = format!("mod {};", name.trim_end_matches(".rs"));
        files
            .iter()
            .any(|(root, text)| is_root(root) && code_only(text).lines().any(|code| code.trim() == line))
    };
    let lost = files.iter().map(|(name, _)| name).filter(|name| !is_root(name) && !is_module(name));
    lost.cloned().collect()
}

#[test]
fn every_file_of_tests_is_run() {
    let file = |name: &str, text: &str| (name.to_string(), text.to_string());
    let planted =
        [file("all.rs", "mod a;\n// mod b;\n"), file("a.rs", "mod c;"), file("b.rs", ""), file("c.rs", "")];
    let manifest = "[package]\nautotests = false\n[[test]]\nname = \"all\"\npath = \"tests/all.rs\"";
    assert_eq!(tests_of_no_executable(&manifest.parse().unwrap(), &planted), ["b.rs", "c.rs"]);
    let mut findings = Vec::new();
    for (name, folder) in crates() {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        let tests = folder.join("tests");
        let Ok(entries) = fs::read_dir(&tests) else { continue };
        let paths = entries.map(|entry| entry.unwrap().path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
        let below = |path: &Path| path.strip_prefix(&tests).unwrap().to_string_lossy().into_owned();
        let files: Vec<_> = paths.map(|path| (below(&path), fs::read_to_string(&path).unwrap())).collect();
        let lost = tests_of_no_executable(&manifest, &files);
        findings.extend(lost.iter().map(|file| format!("{name}/tests/{file}: add `mod` to tests/all.rs")));
    }
    assert_none("files of tests that nothing runs", &findings);
}

/// Source files with unit tests, of a library that is not built for them, that no root of tests takes in: a root declares
/// `#[path = "../src"] mod source { .. }` and names the modules to build, each with all below it.
fn unit_tests_of_no_executable(
    manifest: &toml::Table,
    sources: &[(String, String)],
    roots: &str,
) -> Vec<String> {
    if manifest.get("lib").and_then(|lib| lib.get("test")?.as_bool()) != Some(false) {
        return Vec::new();
    }
    let has_tests = |text: &str| code_only(text).contains("#[test]");
    let declared = roots.split("#[path = \"../src\"]").skip(1).filter_map(|rest| rest.split('}').next());
    let taken_in: Vec<&str> = declared
        .flat_map(|block| block.split("mod ").filter_map(|rest| rest.split_once(';')))
        .map(|(name, _)| name)
        .collect();
    let is_run =
        |name: &str| taken_in.contains(&name.trim_end_matches(".rs").split('/').next().unwrap_or(name));
    let lost = sources.iter().filter(|(name, text)| has_tests(text) && !is_run(name));
    lost.map(|(name, _)| name.clone()).collect()
}

#[test]
fn every_unit_test_is_run() {
    let file = |name: &str| (name.to_string(), "#[test]\nfn f() {}".to_string());
    let planted = [file("a/tests.rs"), file("ab.rs"), file("b/tests.rs")];
    let manifest = "[lib]\ntest = false".parse().unwrap();
    let roots = "mod b;\n#[path = \"../src\"]\nmod source {\n    pub mod a;\n}\n";
    assert_eq!(unit_tests_of_no_executable(&manifest, &planted, roots), ["ab.rs", "b/tests.rs"]);
    let mut findings = Vec::new();
    for (name, folder) in crates() {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap();
        let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).unwrap());
        let below =
            |path: &Path| path.strip_prefix(folder.join("src")).unwrap().to_string_lossy().into_owned();
        let files = sources(&folder.join("src"), &["rs"]).into_iter().map(read);
        let files: Vec<_> = files.map(|(path, text)| (below(&path), text)).collect();
        let tests = folder.join("tests");
        let roots = if tests.is_dir() { sources(&tests, &["rs"]) } else { Vec::new() };
        let roots: String = roots.into_iter().map(|path| read(path).1).collect();
        let lost = unit_tests_of_no_executable(&manifest, &files, &roots);
        findings.extend(lost.iter().map(|file| format!("{name}/src/{file}: no executable has its tests")));
    }
    assert_none("unit tests that nothing runs", &findings);
}

#[test]
fn every_exception_has_a_reason() {
    for (what, reason) in EXCEPTIONS {
        assert!(!what.is_empty() && reason.len() > 10, "{what}: an exception needs a reason");
    }
}

/// The walk from prompt to gradient: each line ends in a file and a function of it.
#[test]
fn the_walk_in_architecture_md_names_files_and_functions_that_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let walk = text.split("### One token's way").nth(1).unwrap().split(" ## ").next().unwrap();
    let mut n_places = 0;
    for place in walk.split("`crates/").skip(1) {
        let mut quoted = place.split('`');
        let file = format!("crates/{}", quoted.next().unwrap());
        let function = quoted.nth(1).unwrap();
        let code = code_only(&fs::read_to_string(root().join(&file)).unwrap_or_default());
        let is_there = rust_functions(&code).iter().any(|found| found.name == function);
        assert!(is_there, "ARCHITECTURE.md names {function} of {file}, which does not exist");
        n_places += 1;
    }
    println!("{n_places} places of the walk exist");
    assert_eq!(n_places, 15);
}

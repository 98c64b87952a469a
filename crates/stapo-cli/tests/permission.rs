//! Whose code a verifier runs: a permission is for one program in one place, with the files beside it that Python would
//! import.

#![cfg(unix)]

use crate::common::{copy_folder, folder_below_tmp, root};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const SMALL: [&str; 12] = [
    "--set",
    "steps=2",
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=2",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation={problems=2,every_steps=0}",
    "--set",
    "record.checkpoint_every_steps=1",
];

/// Calls that would start the verifier of a run.
const JUDGING: [&[&str]; 2] = [&["verify", "run", "--replay", "--steps", "1"], &["train", "--resume", "run"]];

/// Leaves a trace in the folder from which the program was started.
const HOSTILE: &str = "open('trace', 'w').write('hostile')\nraise SystemExit\n";

/// A user's project with a verifier in `judge/judge.py` and a run that was trained with it.
struct Project {
    folder: TempDir,
}

impl Project {
    /// `python` verifiers call a function of the file, `command` verifiers start it.
    fn trained(kind: &str) -> Self {
        let project = Self { folder: folder_below_tmp() };
        fs::create_dir_all(project.at("mine/judge")).unwrap();
        let (source, keys) = if kind == "python" {
            let function =
                "import helper\ndef reward(prompt, response, reference, row):\n    return helper.value()\n";
            (function.to_string(), "file=\"judge/judge.py\"")
        } else {
            let judge = root().join("examples/own_reward/judge.py");
            (fs::read_to_string(judge).unwrap(), "program=\"python3\",args=[\"judge/judge.py\"]")
        };
        fs::write(project.at("mine/judge/judge.py"), source).unwrap();
        fs::write(project.at("mine/judge/helper.py"), "def value():\n    return 0.5\n").unwrap();
        project.train(&format!("kind=\"{kind}\",{keys}"));
        project
    }

    /// Trains with a verifier of these keys.
    fn train(&self, keys: &str) {
        let verifier = format!("task.verifier={{{keys}}}");
        let _ = fs::remove_dir_all(self.at("mine/run"));
        let args = [&["train", "--out", "run", "--set", &verifier], &SMALL[..]].concat();
        let output = self.call("mine", &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Calls the program as the user of the project, in a folder.
    fn call(&self, folder: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(self.at(folder)).args(args).env("XDG_STATE_HOME", self.at("state"));
        command.output().unwrap()
    }

    /// Calls that must all be refused without a trace of hostile code.
    fn refuses(&self, folder: &str) -> String {
        let mut said = String::new();
        for args in JUDGING {
            let output = self.call(folder, args);
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
            assert!(said.contains("not started") && said.contains("--allow-command"), "{args:?}: {said}");
        }
        self.has_no_trace(folder);
        said
    }

    fn accepts(&self, folder: &str) {
        for args in JUDGING {
            let output = self.call(folder, args);
            assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        self.has_no_trace(folder);
    }

    fn has_no_trace(&self, folder: &str) {
        assert!(!self.at(folder).join("trace").exists(), "hostile code has run in {folder}");
    }
}

#[test]
fn a_permission_does_not_travel_with_a_copied_folder() {
    for kind in ["command", "python"] {
        let project = Project::trained(kind);
        project.accepts("mine");
        copy_folder(&project.at("mine"), &project.at("archive"));
        project.refuses("archive");
        for name in ["json.py", "re.py", "helper.py"] {
            fs::write(project.at("archive/judge").join(name), HOSTILE).unwrap();
        }
        project.refuses("archive");
        // A link to the user's own files is another place as well.
        fs::remove_dir_all(project.at("archive/judge")).unwrap();
        fs::create_dir(project.at("archive/judge")).unwrap();
        let link = project.at("archive/judge/judge.py");
        std::os::unix::fs::symlink(project.at("mine/judge/judge.py"), link).unwrap();
        project.refuses("archive");
        project.accepts("mine");
    }
}

#[test]
fn every_importable_file_beside_the_program_is_part_of_the_permission() {
    let project = Project::trained("command");
    let judge = project.at("mine/judge");
    for name in
        ["json.py", "json.pyc", "json.cpython-311-x86_64-linux-gnu.so", "json/__init__.py", "a/b/c.py"]
    {
        let path = judge.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, HOSTILE).unwrap();
        project.refuses("mine");
        fs::remove_file(&path).unwrap();
    }
    // What Python does not import changes nothing: data, folders with a dot, and caches, which are not read.
    for name in ["notes.txt", ".venv/lib/json.py", "__pycache__/json.cpython-311.pyc"] {
        let path = judge.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, HOSTILE).unwrap();
    }
    project.accepts("mine");
    // Too many files to compare are refused, with the remedy.
    for n in 0..1000 {
        fs::write(judge.join(format!("module_{n}.py")), "").unwrap();
    }
    let said = project.refuses("mine");
    assert!(said.contains("more than 1000 files") && said.contains("a separate folder"), "{said}");
}

#[test]
fn more_than_64_mb_beside_the_program_are_refused() {
    let project = Project::trained("command");
    let large = fs::File::create(project.at("mine/judge/large.so")).unwrap();
    large.set_len(65_000_000).unwrap();
    let said = project.refuses("mine");
    assert!(said.contains("64 MB"), "{said}");
    // The user's own config is refused too, with the remedy.
    let verifier = "task.verifier={kind=\"command\",program=\"python3\",args=[\"judge/judge.py\"]}";
    let output =
        project.call("mine", &[&["train", "--out", "again", "--set", verifier], &SMALL[..]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("64 MB") && said.contains("a separate folder"), "{said}");
}

/// An interpreter finds its packages by the path of the link that starts it, as in a virtual environment.
#[test]
fn an_interpreter_behind_a_link_in_another_place_is_another_program() {
    let project = Project::trained("python");
    let interpreter = python(project.folder.path(), "import sys; print(sys.executable)");
    let judge = project.at("mine/judge/judge.py");
    for folder in ["mine", "archive"] {
        fs::create_dir_all(project.at(folder).join("env")).unwrap();
        std::os::unix::fs::symlink(&interpreter, project.at(folder).join("env/python")).unwrap();
    }
    project.train(&format!("kind=\"python\",python=\"env/python\",file={:?}", judge.to_str().unwrap()));
    project.accepts("mine");
    copy_folder(&project.at("mine/run"), &project.at("archive/run"));
    project.refuses("archive");
}

/// The first line of `python3 -c` with these words.
fn python(at: &Path, code: &str) -> String {
    let output = Command::new("python3").current_dir(at).args(["-c", code]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_string()
}

#[test]
fn a_function_imports_neither_from_the_current_folder_nor_from_caches() {
    let project = Project::trained("python");
    assert!(!project.at("mine/judge/__pycache__").exists(), "no cache is written");
    for name in ["json.py", "contextlib.py", "helper.py"] {
        fs::write(project.at("mine").join(name), HOSTILE).unwrap();
    }
    // A cache that Python would trust without looking at the source.
    let compile = format!(
        "import importlib.util as u, py_compile as p; p.compile('{}', u.cache_from_source('{}'), invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)",
        project.at("mine/helper.py").display(),
        project.at("mine/judge/helper.py").display()
    );
    fs::create_dir(project.at("mine/judge/__pycache__")).unwrap();
    python(project.folder.path(), &compile);
    project.accepts("mine");
}

#[test]
fn a_program_imports_neither_from_its_folder_nor_from_caches() {
    let project = Project::trained("command");
    let is_safe =
        python(project.folder.path(), "import sys; print(hasattr(sys.flags, 'safe_path'))") == "True";
    if !is_safe {
        return println!("skipped: this Python is older than 3.11 and has no PYTHONSAFEPATH");
    }
    // Even where the user allows the program.
    fs::write(project.at("mine/judge/json.py"), HOSTILE).unwrap();
    let allowed = [JUDGING[0], &["--allow-command"]].concat();
    let output = project.call("mine", &allowed);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    project.has_no_trace("mine");
}

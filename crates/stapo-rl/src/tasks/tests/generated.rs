use super::*;
use std::collections::HashSet;

fn arithmetic(level: usize) -> Task {
    Task::open(&TaskSpec::Arithmetic(ArithmeticSpec::at_level(level).unwrap())).unwrap()
}

fn countdown() -> Task {
    Task::open(&TaskSpec::Countdown(CountdownSpec::default())).unwrap()
}

fn train(task: &Task, seed: u64, n: u64) -> Vec<Problem> {
    (0..n).map(|position| task.problem(seed, Split::Train, position).unwrap()).collect()
}

/// The share of worked solutions that the task's own verifier judges right.
fn share_right(task: &Task, mistakes: &Mistakes, n: u64) -> f64 {
    let problems = train(task, 1, n);
    let texts: Vec<String> =
        problems.iter().map(|problem| task.solution(problem, mistakes).unwrap()).collect();
    let samples: Vec<_> =
        problems.iter().zip(&texts).map(|(problem, text)| (problem, text.as_str())).collect();
    let n_right = verdicts(task, &samples).into_iter().filter(|&verdict| verdict == Verdict::Right).count();
    n_right as f64 / n as f64
}

#[test]
fn training_never_meets_a_held_out_problem_whatever_the_seed() {
    for task in [arithmetic(2), arithmetic(3), countdown()] {
        let held_out: HashSet<String> =
            task.held_out(usize::MAX).into_iter().map(|problem| problem.id).collect();
        assert_eq!(
            held_out.len() as u64,
            task.n_problems(Split::HeldOut).unwrap(),
            "held-out problems differ"
        );
        for seed in [0, 1, 977, u64::MAX] {
            for problem in train(&task, seed, 500) {
                assert!(!held_out.contains(&problem.id), "{} is held out", problem.id);
            }
        }
    }
}

#[test]
fn a_problem_is_a_function_of_seed_and_position() {
    for open in [|| arithmetic(4), countdown] {
        let (one, other) = (open(), open());
        let problems = train(&one, 5, 200);
        let backwards: Vec<_> =
            (0..200).rev().map(|at| other.problem(5, Split::Train, at).unwrap()).collect();
        assert!(problems.iter().eq(backwards.iter().rev()));
        assert_ne!(problems, train(&one, 6, 200));
        assert_eq!(one.held_out(50), other.held_out(50));
        assert_eq!(one.problem(5, Split::HeldOut, 7).unwrap(), one.problem(6, Split::HeldOut, 7).unwrap());
        assert_eq!(one.problem(0, Split::HeldOut, 500 + 7).unwrap(), one.held_out(8)[7]);
        assert_eq!(one.n_problems(Split::Train), None);
    }
}

/// Problems that must not change: a change would change every run and the base model.
#[test]
fn first_problems_stay_what_they_are() {
    let ids =
        |task: &Task| train(task, 0, 4).into_iter().map(|problem| problem.id).collect::<Vec<_>>().join(" ");
    for (level, first) in (1..).zip(FIRST_OF_LEVELS) {
        assert_eq!(ids(&arithmetic(level)), first, "level {level}");
    }
    assert_eq!(ids(&countdown()), FIRST_COUNTDOWN);
}

const FIRST_OF_LEVELS: [&str; 6] = [
    "6+9 3+3 5-1 4-3",
    "6+9+8 3+3*3 5*1-5 2*7-6",
    "(1+2-7)*3 3+3*3+1 5*1-5+2 4-(3+8+4)",
    "12-(19+17+9) 5+7*5-2*19 9+9-15+15/15 5*(16-12-18)/1",
    "5-(30*16*2-33) 1*30-31-21+38*22 23-46+38+34+15*26 11*(39-29-43/1)+31",
    "9-59*(31*3-65-91) 21*53+68-40*28-45-60 29*(34-22+16-46+21) 21*(77-57-85/1)+61+21",
];
const FIRST_COUNTDOWN: &str = "5,14,5,17:3 4,18,16,7:74 1,16,15,4:35 3,5,3,17:23";

#[test]
fn flawless_solutions_are_always_right() {
    for level in 1..=6 {
        assert_eq!(share_right(&arithmetic(level), &Mistakes::NONE, 600), 1.0, "level {level}");
    }
    assert_eq!(share_right(&countdown(), &Mistakes::NONE, 500), 1.0);
}

#[test]
fn mistakes_lower_the_share_of_right_solutions_as_documented() {
    let share = share_right(&arithmetic(3), &Mistakes::default(), 2000);
    assert!((0.40..0.50).contains(&share), "default level: {share}");
    let only_results = Mistakes { wrong_result_share: 1.0, ..Mistakes::NONE };
    let share = share_right(&arithmetic(1), &only_results, 1000);
    assert_eq!(share, 0.0, "one wrong operation is a wrong answer");
    let only_skips = Mistakes { skipped_step_share: 1.0, ..Mistakes::NONE };
    assert_eq!(share_right(&arithmetic(4), &only_skips, 1000), 1.0, "a skipped step alone is no mistake");
    let share = share_right(&countdown(), &Mistakes::default(), 500);
    assert!((0.2..0.8).contains(&share), "countdown: {share}");
}

#[test]
fn another_seed_makes_other_mistakes_in_the_same_problem() {
    let task = arithmetic(4);
    let problem = task.problem(0, Split::Train, 3).unwrap();
    let texts: HashSet<String> = (0..200)
        .map(|seed| task.solution(&problem, &Mistakes { seed, ..Mistakes::default() }).unwrap())
        .collect();
    assert!(texts.len() > 10, "{texts:?}");
    let again = Mistakes { seed: 9, ..Mistakes::default() };
    assert_eq!(task.solution(&problem, &again).unwrap(), task.solution(&problem, &again).unwrap());
}

#[test]
fn solutions_write_one_operation_per_step() {
    let task = arithmetic(3);
    for (id, expected) in [
        ("7+5*2", r"7+10=\boxed{17}"),
        ("(8-3)*4+7", r"5*4+7=20+7=\boxed{27}"),
        ("9-8-7", r"1-7=\boxed{-6}"),
        ("2*(3-5)", r"2*(-2)=\boxed{-4}"),
        ("1-(2-9)*3", r"1-(-7)*3=1-(-21)=\boxed{22}"),
        ("8/4*3", r"2*3=\boxed{6}"),
    ] {
        let problem = Problem {
            id: id.into(),
            earlier_turns: Vec::new(),
            prompt: String::new(),
            reference: String::new(),
        };
        assert_eq!(without_words(&task.solution(&problem, &Mistakes::NONE).unwrap()), expected);
    }
}

/// The steps without the words, joined by `=`.
fn without_words(solution: &str) -> String {
    let steps: Vec<&str> = solution.split(", ").map(|step| step.split_once(' ').unwrap().1).collect();
    steps.join("=")
}

#[test]
fn words_vary_and_typos_come_as_often_as_asked() {
    let task = arithmetic(3);
    let words = |typo_share: f64| -> Vec<String> {
        let mistakes = Mistakes { typo_share, ..Mistakes::NONE };
        let solutions = train(&task, 0, 600).into_iter().map(|p| task.solution(&p, &mistakes).unwrap());
        let steps: Vec<String> =
            solutions.flat_map(|s| s.split(", ").map(String::from).collect::<Vec<_>>()).collect();
        steps.iter().map(|step| step.split_once(' ').unwrap().0.to_string()).collect()
    };
    let (clean, flawed) = (words(0.0), words(0.1));
    let distinct: HashSet<&String> = clean.iter().collect();
    assert_eq!(distinct.len(), 8, "{distinct:?}");
    let letters = |words: &[String]| words.iter().map(String::len).sum::<usize>();
    assert_eq!(letters(&clean), letters(&flawed));
    let typos = clean.iter().zip(&flawed).flat_map(|(a, b)| a.bytes().zip(b.bytes())).filter(|(a, b)| a != b);
    let share = typos.count() as f64 / letters(&clean) as f64;
    assert!((0.09..0.11).contains(&share), "{share}");
}

#[test]
fn a_wrong_order_is_followed_through() {
    let task = arithmetic(3);
    let problem = Problem {
        id: "7+5*2".into(),
        earlier_turns: Vec::new(),
        prompt: String::new(),
        reference: "17".into(),
    };
    let astray = Mistakes { wrong_order_share: 1.0, ..Mistakes::NONE };
    assert_eq!(without_words(&task.solution(&problem, &astray).unwrap()), r"12*2=\boxed{24}");
}

#[test]
fn prompts_and_solutions_keep_to_the_alphabet_and_stay_short() {
    let mut met = HashSet::new();
    for (task, max_chars) in [
        (arithmetic(1), 17),
        (arithmetic(3), 60),
        (arithmetic(4), 100),
        (arithmetic(6), 250),
        (countdown(), 70),
    ] {
        for problem in train(&task, 3, 600) {
            let text = task.solution(&problem, &Mistakes::default()).unwrap();
            assert!(text.len() <= max_chars, "{} characters: {text}", text.len());
            met.extend(problem.prompt.chars().chain(text.chars()));
        }
    }
    let mut met: Vec<char> = met.into_iter().collect();
    met.sort_unstable();
    assert_eq!(met.into_iter().collect::<String>(), ALPHABET);
}

#[test]
fn expressions_keep_to_the_spec() {
    let spec =
        ArithmeticSpec { negative_results: false, max_result: 50, ..ArithmeticSpec::at_level(4).unwrap() };
    let task = Task::open(&TaskSpec::Arithmetic(spec)).unwrap();
    let problems = train(&task, 2, 3000);
    for problem in &problems {
        let value: i64 = problem.reference.parse().unwrap();
        assert!((0..=50).contains(&value), "{} = {value}", problem.id);
    }
    let share =
        |symbol: char| problems.iter().filter(|problem| problem.id.contains(symbol)).count() as f64 / 3000.0;
    for symbol in ['+', '-', '*', '/', '('] {
        assert!(share(symbol) > 0.1, "{symbol} in {} of the problems", share(symbol));
    }
}

#[test]
fn shapes_have_the_shares_the_spec_names() {
    let task = arithmetic(4);
    let problems = train(&task, 4, 6000);
    let share =
        |holds: &dyn Fn(&str) -> bool| problems.iter().filter(|p| holds(&p.id)).count() as f64 / 6000.0;
    let with_parentheses = share(&|id| id.contains('('));
    assert!((0.47..0.53).contains(&with_parentheses), "{with_parentheses}");
    for n_operators in 2..=4 {
        let share = share(&|id| id.matches(['+', '-', '*', '/']).count() == n_operators);
        assert!((0.30..0.37).contains(&share), "{n_operators} operators: {share}");
    }
}

#[test]
fn specs_round_trip_and_refuse_what_they_do_not_know() {
    let read = |text: &str| TaskSpec::read("task", toml::from_str(text).unwrap());
    let spec =
        read("kind = \"arithmetic\"\nlevel = 2\nmax_operand = 12\noperators = [\"+\", \"*\"]").unwrap();
    let TaskSpec::Arithmetic(inner) = &spec else { panic!("{spec:?}") };
    assert_eq!((inner.max_operators, inner.max_operand), (2, 12));
    assert_eq!(inner.operators, [Operator::Add, Operator::Multiply]);
    assert_eq!(read(&toml::to_string(&spec).unwrap()).unwrap(), spec);
    for kind in ["arithmetic", "countdown"] {
        let spec = read(&format!("kind = \"{kind}\"")).unwrap();
        assert_eq!(read(&toml::to_string(&spec).unwrap()).unwrap(), spec);
        let unknown = read(&format!("kind = \"{kind}\"\nnumber = 1")).unwrap_err().to_string();
        assert!(unknown.contains("unknown key `number`"), "{unknown}");
    }
    let command = "kind = \"jsonl\"\npath = \"a\"\nverifier = { kind = \"command\", program = \"x\" }";
    assert_eq!(read(&toml::to_string(&read(command).unwrap()).unwrap()).unwrap(), read(command).unwrap());
    let rule =
        read("kind = \"parquet\"\npath = \"a\"\nverifier = { kind = \"rule\", mode = \"boxed-exact\" }")
            .unwrap();
    let TaskSpec::Parquet(rows) = rule else { panic!() };
    let mode = Mode::BoxedExact;
    assert_eq!(rows.verifier, VerifierSpec::Rule(RuleSpec { mode, ..RuleSpec::default() }));
    for (level, expected) in [
        ("7", "task.level: 7 is not on the ladder\nhint: a number from 1 to 6"),
        ("\"hard\"", "task.level: \"hard\" is not on the ladder"),
    ] {
        let said = read(&format!("kind = \"arithmetic\"\nlevel = {level}")).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
    let all = format!("level = 2\n{}", toml::to_string(&spec).unwrap());
    let said = TaskSpec::read("task", toml::from_str(&all).unwrap()).unwrap_err().to_string();
    assert!(said.contains("task.level: 2 changes nothing"), "{said}");
    assert!(read("kind = \"countdown\"\nlevel = 2").unwrap_err().to_string().contains("unknown key `level`"));
    assert!(read("kind = \"sums\"").unwrap_err().to_string().contains("unknown kind `sums`"));
    assert!(read("kind = \"jsonl\"").unwrap_err().to_string().contains("the key `path` is missing"));
}

#[test]
fn impossible_specs_are_refused_with_the_key_and_the_remedy() {
    let base = ArithmeticSpec::default;
    for (spec, key) in [
        (ArithmeticSpec { min_operators: 0, ..base() }, "min_operators"),
        (ArithmeticSpec { max_operators: 1, ..base() }, "min_operators"),
        (ArithmeticSpec { max_operators: 1000, ..base() }, "max_operators"),
        (ArithmeticSpec { min_operand: 10, ..base() }, "min_operand"),
        (ArithmeticSpec { min_operand: -1, ..base() }, "min_operand"),
        (ArithmeticSpec { max_operand: i64::MAX, ..base() }, "max_operand"),
        (ArithmeticSpec { max_result: 0, ..base() }, "max_result"),
        (ArithmeticSpec { operators: vec![], ..base() }, "operators"),
        (ArithmeticSpec { parentheses_share: f64::NAN, ..base() }, "parentheses_share"),
        (ArithmeticSpec { held_out_share: 1.5, ..base() }, "held_out_share"),
        (ArithmeticSpec { min_operand: 9, max_result: 1, operators: vec![Operator::Add], ..base() }, "spec"),
        (ArithmeticSpec { template: Some("{{ problem".into()), ..base() }, "template"),
        (ArithmeticSpec { template: Some("{{ riddle }}".into()), ..base() }, "template"),
        (
            ArithmeticSpec { verifier: VerifierSpec::Countdown(CountdownRule::default()), ..base() },
            "does not read like 2,3,5,7:24",
        ),
    ] {
        let message = refusal(&TaskSpec::Arithmetic(spec));
        assert!(message.contains(key), "{key}: {message}");
    }
    for spec in [
        CountdownSpec { min_numbers: 1, ..CountdownSpec::default() },
        CountdownSpec { max_numbers: 9, ..CountdownSpec::default() },
        CountdownSpec { max_target: 0, ..CountdownSpec::default() },
        CountdownSpec { max_number: -3, ..CountdownSpec::default() },
    ] {
        refusal(&TaskSpec::Countdown(spec));
    }
}

#[test]
fn a_task_without_held_out_problems_says_so_only_when_asked_for_one() {
    let spec = ArithmeticSpec { held_out_share: 0.0, ..ArithmeticSpec::default() };
    let task = Task::open(&TaskSpec::Arithmetic(spec)).unwrap();
    assert_eq!(task.n_problems(Split::HeldOut), Some(0));
    assert!(task.held_out(10).is_empty());
    let message = task.problem(0, Split::HeldOut, 0).unwrap_err().to_string();
    assert!(message.contains("held-out split holds no problem\nhint: raise held_out_share"), "{message}");
}

#[test]
fn templates_are_bounded_and_keep_their_last_newline() {
    let open = |template: &str| {
        Task::open(&TaskSpec::Arithmetic(ArithmeticSpec {
            template: Some(template.into()),
            ..ArithmeticSpec::default()
        }))
    };
    let task = open("Compute {{ problem }}.\n").unwrap();
    let problem = task.problem(0, Split::Train, 0).unwrap();
    assert_eq!(problem.prompt, format!("Compute {}.\n", problem.id));
    for endless in [
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 100000000 }}",
        "",
    ] {
        let message = open(endless).err().expect(endless).to_string();
        assert!(message.starts_with("task template") && message.contains("\nhint: "), "{message}");
    }
}

#[test]
fn foreign_problems_have_no_worked_solution() {
    for task in [arithmetic(3), countdown()] {
        for id in ["", "7+", "(7", "7)", "a+b", "7+-2", "1,2", "1,2:x", "99999999999999999999+1", "7 + 5"] {
            let problem = Problem {
                id: id.into(),
                earlier_turns: Vec::new(),
                prompt: String::new(),
                reference: String::new(),
            };
            assert!(task.solution(&problem, &Mistakes::NONE).is_err(), "{id}");
        }
    }
}

#[test]
fn countdown_verdicts() {
    use Verdict::{NoAnswer, OverBudget, Right, Unparsable, Wrong};
    let once = countdown();
    let rule = VerifierSpec::Countdown(CountdownRule { number_use: NumberUse::AtMostOnce });
    let at_most =
        Task::open(&TaskSpec::Countdown(CountdownSpec { verifier: rule, ..CountdownSpec::default() }))
            .unwrap();
    let deep = format!(r"\boxed{{{}1{}}}", "(".repeat(200), ")".repeat(200));
    let long = format!(r"\boxed{{1{}}}", "+1".repeat(2000));
    let signs = format!(r"\boxed{{{}1}}", "-".repeat(900));
    let huge = format!(r"\boxed{{{}*{}}}", "9".repeat(18), vec!["9".repeat(18); 20].join("*"));
    for (response, exactly, most) in [
        (r"\boxed{8/(3-8/3)}", Right, Right),
        (r"\boxed{8 \div (3 - 8 ÷ 3)}", Right, Right),
        (r"\boxed{3*8}", Wrong, Right),
        (r"\boxed{3\times 8+3-3}", Wrong, Wrong),
        (r"\boxed{8*3+(8-8)*3}", Wrong, Wrong),
        (r"\boxed{24}", Wrong, Wrong),
        (r"\boxed{8+8+3+3}", Wrong, Wrong),
        (r"\boxed{8/(3-3)+8}", Wrong, Wrong),
        (r"\boxed{-(8-8)*3+3}", Wrong, Wrong),
        (r"\boxed{}", NoAnswer, NoAnswer),
        ("8/(3-8/3)", NoAnswer, NoAnswer),
        (r"\boxed{8/(3-8/3)", NoAnswer, NoAnswer),
        (r"\boxed{8/(3-8/3)=24}", Unparsable, Unparsable),
        (r"\boxed{8**3}", Unparsable, Unparsable),
        (r"\boxed{8/(3-8/3}", Unparsable, Unparsable),
        (r"\boxed{__import__('os')}", Unparsable, Unparsable),
        (r"\boxed{３*8}", Unparsable, Unparsable),
        (&deep, Unparsable, Unparsable),
        (&long, Unparsable, Unparsable),
        (&signs, Unparsable, Unparsable),
        (&huge, OverBudget, OverBudget),
    ] {
        let problem = Problem {
            id: "p".into(),
            earlier_turns: Vec::new(),
            prompt: String::new(),
            reference: "3,3,8,8:24".into(),
        };
        assert_eq!(verdicts(&once, &[(&problem, response)]), [exactly], "exactly once: {response}");
        assert_eq!(verdicts(&at_most, &[(&problem, response)]), [most], "at most once: {response}");
    }
}

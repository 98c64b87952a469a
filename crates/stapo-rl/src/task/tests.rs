use super::*;
use stapo_core::Verdict;

fn share_right(task: &Task, mistakes: &Mistakes, n: u64) -> f64 {
    let problems: Vec<Problem> = (0..n).map(|i| task.problem(1, Split::Train, i).unwrap()).collect();
    let texts: Vec<String> = problems.iter().map(|p| task.solution(p, mistakes).unwrap()).collect();
    for (p, t) in problems.iter().zip(&texts).take(12) {
        println!("{}{t}   [{}]", p.prompt, p.reference);
    }
    let lens: Vec<usize> = texts.iter().map(String::len).collect();
    println!("len mean {} max {}", lens.iter().sum::<usize>() as f64 / n as f64, lens.iter().max().unwrap());
    let samples: Vec<(&Problem, &str)> = problems.iter().zip(&texts).map(|(p, t)| (p, t.as_str())).collect();
    let judged = task.judge(&samples).unwrap();
    judged.iter().filter(|j| j.verdict == Verdict::Right).count() as f64 / n as f64
}

#[test]
fn show() {
    for level in 1..=6 {
        let task = Task::open(&TaskSpec::Arithmetic(ArithmeticSpec::at_level(level).unwrap())).unwrap();
        println!("level {level}: held out {:?}", task.n_problems(Split::HeldOut));
        println!("right {}", share_right(&task, &Mistakes::NONE, 2000));
        println!("right {}", share_right(&task, &Mistakes::default(), 2000));
    }
    let task = Task::open(&TaskSpec::Countdown(CountdownSpec::default())).unwrap();
    println!("right {}", share_right(&task, &Mistakes::NONE, 2000));
    println!("right {}", share_right(&task, &Mistakes::default(), 2000));
}

//! Attacks.

use crate::common::{asserted, pools};
use stapo_sandbox::{End, Request};

#[test]
fn a_program_runs_and_its_output_comes_back() {
    for pool in pools() {
        println!("{:?}", pool.layers());
        let start = std::time::Instant::now();
        let outcomes =
            pool.run(&[Request { source: "print(int(input()) * 2)", stdin: "21\n" }; 100]).unwrap();
        println!("{:?} for {}", start.elapsed(), outcomes.len());
        for outcome in outcomes {
            assert_eq!(
                (outcome.end, outcome.stdout.as_str(), outcome.stderr.as_str()),
                (End::Finished, "42\n", "")
            );
        }
        let tested = asserted(&pool, "def f(x): return x + 1", &["assert f(1) == 2", "assert f(1) == 3"]);
        println!("{tested:?}");
        assert!(tested.tests[0].passed && !tested.tests[1].passed);
    }
}

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Pool;

#[test]
fn every_task_runs_exactly_once() {
    for threads in [1, 2, 5] {
        let pool = Pool::new(threads);
        for n_tasks in [0, 1, 2, 3, 100] {
            let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(n_tasks, &|task| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn many_short_calls_in_a_row_and_after_a_rest_all_complete() {
    let pool = Pool::new(3);
    let sum = AtomicUsize::new(0);
    for round in 0..3 {
        for _ in 0..5000 {
            pool.run(4, &|task| {
                sum.fetch_add(task + 1, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), (round + 1) * 5000 * 10);
        // The workers fall asleep meanwhile.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_call_from_inside_a_task_runs_in_place() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    pool.run(4, &|_| {
        pool.run(3, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(count.load(Ordering::Relaxed), 12);
}

#[test]
fn several_callers_take_turns() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(5, &|_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 3 * 200 * 5);
}

#[test]
fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new(3);
    for bad in 0..6 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(6, &|task| assert!(task != bad, "task {task}"));
        }));
        assert!(outcome.is_err());
    }
    let count = AtomicUsize::new(0);
    pool.run(9, &|_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(count.load(Ordering::Relaxed), 9);
}

use super::*;

/// The published `SplitMix64` outputs for seed 1234567; here the seed is the raw state.
#[test]
fn outputs_are_splitmix64() {
    let expected = [
        6457827717110365317_u64,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ];
    for (counter, expected) in expected.into_iter().enumerate() {
        assert_eq!(splitmix64(1234567, counter as u64), expected);
    }
}

#[test]
fn every_counter_and_its_place_matter() {
    let mut seen = std::collections::HashSet::new();
    for seed in 0..16 {
        for a in 0..16 {
            for b in 0..16 {
                assert!(seen.insert(Key::new(seed).with(a).with(b).bits()), "({seed}, {a}, {b}) repeats");
            }
        }
    }
    assert_ne!(Key::new(3), Key::new(3).with(0));
}

#[test]
fn a_prefix_gives_the_same_number_as_the_whole_key() {
    let prefix = Key::new(7).with(1);
    assert_eq!(prefix.with(9).bits(), Key::new(7).with(1).with(9).bits());
}

#[test]
fn each_bit_is_set_half_of_the_time_along_every_counter() {
    let n = 1 << 14;
    for axis in 0..3 {
        let mut ones = [0_u32; 64];
        for i in 0..n {
            let mut counters = [5, 5, 5];
            counters[axis] = i;
            let bits = Key::new(counters[0]).with(counters[1]).with(counters[2]).bits();
            for (bit, ones) in ones.iter_mut().enumerate() {
                *ones += (bits >> bit & 1) as u32;
            }
        }
        for (bit, &ones) in ones.iter().enumerate() {
            // Five standard deviations of a binomial with 2^14 trials: 5 * 64 = 320.
            assert!(ones.abs_diff(1 << 13) < 320, "axis {axis}, bit {bit}: {ones} of {n}");
        }
    }
}

#[test]
fn one_flipped_key_bit_flips_half_of_the_output() {
    let mut flipped = 0_u32;
    let n_keys = 256;
    for i in 0..n_keys {
        for bit in 0..64 {
            let counter = Key::new(99).with(i).bits();
            let a = Key::new(1).with(counter).with(0).bits();
            let b = Key::new(1).with(counter ^ (1 << bit)).with(0).bits();
            flipped += (a ^ b).count_ones();
        }
    }
    let share = f64::from(flipped) / (n_keys * 64 * 64) as f64;
    assert!((share - 0.5).abs() < 0.005, "{share}");
}

#[test]
fn uniform_has_the_moments_and_the_pair_correlation_of_a_uniform() {
    let n = 200_000_u64;
    let key = Key::new(11);
    let (mut sum, mut squares, mut lagged) = (0.0, 0.0, 0.0);
    for i in 0..n {
        let x = key.with(i).uniform();
        assert!((0.0..1.0).contains(&x));
        sum += x;
        squares += x * x;
        lagged += (x - 0.5) * (key.with(i + 1).uniform() - 0.5);
    }
    let n = n as f64;
    assert!((sum / n - 0.5).abs() < 5.0 * (1.0 / 12.0_f64).sqrt() / n.sqrt());
    assert!((squares / n - 1.0 / 3.0).abs() < 5.0 * (4.0 / 45.0_f64).sqrt() / n.sqrt());
    assert!((lagged / n).abs() < 5.0 / 12.0 / n.sqrt());
}

#[test]
fn below_is_uniform_and_in_range() {
    let key = Key::new(2);
    for n in [1_u64, 2, 3, 7, 10, 100] {
        let mut counts = vec![0_u32; n as usize];
        let draws = 1000 * n;
        for i in 0..draws {
            counts[key.with(n).with(i).below(n) as usize] += 1;
        }
        let chi_squared: f64 = counts.iter().map(|&c| (f64::from(c) - 1000.0).powi(2) / 1000.0).sum();
        let freedom = (n - 1) as f64;
        assert!(chi_squared <= freedom + 5.0 * (2.0 * freedom).sqrt(), "n {n}: {chi_squared}");
    }
}

#[test]
fn below_redraws_the_uneven_rest() {
    // With n = 3 * 2^62 a multiply-shift without redraws would give every third value half of all draws.
    let n = 3 << 62;
    let draws = 30_000;
    let thirds = (0..draws).filter(|&i| Key::new(4).with(i).below(n).is_multiple_of(3)).count();
    assert!(thirds.abs_diff(10_000) < 5 * 82, "{thirds}");
    assert!(Key::new(4).below(u64::MAX) < u64::MAX);
}

use super::RngKey;

#[test]
fn philox_matches_the_published_vectors() {
    // Known-answer vectors of Random123 for philox4x32-10.
    assert_eq!(RngKey::new(0).block([0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    assert_eq!(RngKey::new(u64::MAX).block([u32::MAX; 4]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    let key = RngKey::new(0x299f31d0_a4093822);
    let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
    assert_eq!(key.block(counter), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
}

#[test]
fn uniforms_fill_the_unit_interval_evenly() {
    let key = RngKey::new(7).derive(3);
    let mut bins = [0; 10];
    for position in 0..20_000 {
        let u = key.uniform(11, 2, position);
        assert!((0.0..1.0).contains(&u));
        bins[(u * 10.0) as usize] += 1;
    }
    // 27.9 is the 0.1 % point of chi-square with 9 degrees of freedom.
    let chi2: f64 = bins.iter().map(|n| (f64::from(*n) - 2000.0).powi(2) / 2000.0).sum();
    assert!(chi2 < 27.9, "chi-square {chi2}");
}

#[test]
fn every_coordinate_of_the_place_changes_the_number() {
    let u = |seed, stream, problem, sample, position| {
        RngKey::new(seed).derive(stream).uniform(problem, sample, position)
    };
    let base = u(1, 2, 3, 4, 5);
    let others = [
        u(2, 2, 3, 4, 5),
        u(1, 3, 3, 4, 5),
        u(1, 2, 3 + (1 << 40), 4, 5),
        u(1, 2, 3, 5, 5),
        u(1, 2, 3, 4, 6),
    ];
    assert!(others.iter().all(|other| *other != base));
    assert_eq!(base, u(1, 2, 3, 4, 5));
}

#[test]
fn normals_have_mean_zero_and_variance_one() {
    let key = RngKey::new(5);
    let n = 20_000;
    let draws: Vec<f64> = (0..n).map(|idx| key.normal(idx)).collect();
    let mean = draws.iter().sum::<f64>() / n as f64;
    let variance = draws.iter().map(|x| x * x).sum::<f64>() / n as f64;
    assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
}

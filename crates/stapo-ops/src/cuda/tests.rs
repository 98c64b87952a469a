use super::kernel_set::{KernelSet, KernelUse};
use super::kernels::{SOURCES, Scope};
use super::{Found, FoundLibrary, Gpu, probe};

fn complete() -> Found {
    let gpu =
        Gpu { name: "GPU".into(), memory_bytes: 1 << 30, compute_capability: (9, 0), multiprocessors: 132 };
    Found {
        driver: Some((13, 0)),
        driver_error: None,
        gpus: vec![gpu],
        nvrtc: FoundLibrary::Version("13.0".into()),
        cublaslt: FoundLibrary::Version("13.0.0".into()),
        nccl: FoundLibrary::Missing { package: "nvidia-nccl-cu13" },
        peers: Vec::new(),
    }
}

#[test]
fn probing_never_fails_and_says_what_is_missing() {
    let found = probe();
    if found.obstacle().is_none() {
        assert!(!found.gpus.is_empty());
    }
    if found.driver.is_none() {
        assert!(found.gpus.is_empty());
        assert!(found.obstacle().is_some_and(|text| text.contains("driver") && text.contains("hint:")));
    }
}

#[test]
fn each_obstacle_names_its_remedy() {
    assert_eq!(complete().obstacle(), None);
    let obstacle = |change: fn(&mut Found)| {
        let mut found = complete();
        change(&mut found);
        found.obstacle().expect("something is missing")
    };
    assert!(obstacle(|f| f.driver = None).contains("driver"));
    assert!(obstacle(|f| f.gpus.clear()).contains("CUDA_VISIBLE_DEVICES"));
    assert!(obstacle(|f| f.gpus[0].compute_capability = (7, 5)).contains("7.5"));
    assert!(
        obstacle(|f| f.nvrtc = FoundLibrary::Missing { package: "a-package" })
            .contains("pip install 'a-package'")
    );
    assert!(
        obstacle(|f| f.cublaslt = FoundLibrary::Missing { package: "b-package" }).contains("libcublasLt")
    );
    assert!(obstacle(|f| f.driver_error = Some("X".into())).contains("failed: X"));
}

/// Layers with a rule of scores wait for the kernels that take it, and for no others that do the same; the first update's come first.
#[test]
fn kernels_are_compiled_for_the_layers_that_use_them() {
    let hopper = KernelSet::new((9, 0), false);
    let names = |head_dim, is_ruled| -> Vec<&str> {
        let used = hopper.used_by(KernelUse::Attention { head_dim, is_ruled });
        used.map(|target| target.source.name).collect()
    };
    let (plain, ruled) = (names(256, false), names(256, true));
    assert!(plain.contains(&"attention_backward_wide_hopper") && ruled.contains(&"matmul_gated_large_m"));
    assert!(ruled.contains(&"attention_backward_wide_hopper_ruled"));
    assert!(!plain.iter().any(|name| name.ends_with("_ruled")) && !plain.contains(&"attention_backward"));
    let plain_form = |name: &&str| name.strip_suffix("_ruled").is_some_and(|plain| ruled.contains(&plain));
    assert!(!ruled.iter().any(plain_form));
    assert!(names(128, false).contains(&"attention_delta") && names(10, true).contains(&"attention_ruled"));
    let turn = |name: &str| SOURCES.iter().find(|source| source.name == name).map(|source| source.turn());
    assert!(turn("elementwise") < turn("attention_pipelined_hopper_ruled"));
    assert!(turn("attention_pipelined_hopper") < turn("sampling"));
}

/// NVRTC compiles without a GPU, so a machine without one finds a broken kernel too.
#[test]
fn every_kernel_compiles_for_every_architecture() {
    if !super::Library::Nvrtc.find() {
        println!(
            "skipped: NVRTC was not found; pip install '{}' and name its folder in {}",
            super::Library::Nvrtc.package().unwrap_or_default(),
            super::SEARCH_VARIABLE
        );
        return;
    }
    std::thread::scope(|scope| {
        for source in SOURCES {
            scope.spawn(move || {
                for (arch, head_dims) in
                    [("sm_80", &[128][..]), ("sm_89", &[64]), ("sm_90a", &[10, 64, 128, 256])]
                {
                    let head_dims = match source.scope {
                        Scope::Once => &[0],
                        Scope::HeadDim | Scope::HeadDimRuled => head_dims,
                        _ if arch != "sm_90a" => &[],
                        Scope::HopperOnce => &[0],
                        Scope::Hopper | Scope::HopperRuled | Scope::HopperOnDemand => source.hopper_dims(),
                    };
                    for head_dim in head_dims {
                        let code = super::kernels::compile(source, arch, *head_dim);
                        let code = code.unwrap_or_else(|error| panic!("{error}"));
                        assert!(code.starts_with(b"\x7fELF"), "{} for {arch}", source.name);
                    }
                }
            });
        }
    });
}

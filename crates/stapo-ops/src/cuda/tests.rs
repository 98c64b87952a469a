use super::kernels::Scope;
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
        for source in super::kernels::SOURCES {
            scope.spawn(move || {
                for (arch, head_dims) in
                    [("sm_80", &[128][..]), ("sm_89", &[64]), ("sm_90a", &[10, 64, 128, 256])]
                {
                    let head_dims = match source.scope {
                        Scope::Once => &[0],
                        Scope::HeadDim | Scope::HeadDimOnDemand => head_dims,
                        Scope::Hopper | Scope::HopperOnDemand if arch == "sm_90a" => source.hopper_dims(),
                        Scope::HopperOnce if arch == "sm_90a" => &[0],
                        Scope::Hopper | Scope::HopperOnDemand | Scope::HopperOnce => &[],
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

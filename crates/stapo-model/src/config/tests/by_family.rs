//! Keys that some families read and others refuse, and ropes by kind of layer.

use super::*;

/// A table for a kind of layer comes before keys for all layers, which change the table of full layers alone.
#[test]
fn ropes_by_kind_come_before_the_keys_of_older_versions() {
    let gemma = |more: &Value| {
        let mut keys = with(&json!({
            "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 9e9,
        }));
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = parse(&keys).unwrap();
        let [sliding, full] =
            config.attentions().map(|layer| layer.rope.clone()).collect::<Vec<_>>().try_into().unwrap();
        (config, sliding, full)
    };
    let rope = |theta, scaling| Rope { theta, scaling };
    let parameters = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    });
    let linear = json!({"rope_type": "linear", "factor": 2.0});
    let (_, sliding, full) = gemma(&json!({"rope_parameters": parameters, "rope_scaling": linear}));
    assert_eq!(
        (sliding, full),
        (rope(7e3, RopeScaling::None), rope(5e4, RopeScaling::Linear { factor: 2.0 }))
    );
    // Without tables by kind, as before transformers 5.
    let old = json!({"rope_theta": 5e4, "rope_local_base_freq": 7e3, "rope_scaling": linear});
    let (config, sliding, full) = gemma(&old);
    assert_eq!(
        (sliding, full),
        (rope(7e3, RopeScaling::None), rope(5e4, RopeScaling::Linear { factor: 2.0 }))
    );
    // As in transformers, a table without a theta has the class's, and so have layers whose table is null.
    let of_sliding = |table: Value, more: Value| {
        let full = json!({"rope_type": "default", "rope_theta": 5e4});
        let mut keys = json!({"rope_parameters": {"full_attention": full, "sliding_attention": table}});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        gemma(&keys).1
    };
    let without_theta = json!({"rope_type": "linear", "factor": 2.0});
    assert_eq!(of_sliding(without_theta.clone(), json!({})), rope(1e4, RopeScaling::Linear { factor: 2.0 }));
    let local = json!({"rope_local_base_freq": 7e3});
    assert_eq!(of_sliding(without_theta, local), rope(7e3, RopeScaling::Linear { factor: 2.0 }));
    assert_eq!(of_sliding(Value::Null, json!({})), rope(1e4, RopeScaling::None));
    let no_window = json!({"model_type": "gemma3_text", "architectures": null, "sliding_window": null});
    check_refused(&no_window, &["sliding_window", "is null", "full_attention in layer_types"]);
    // Both layouts are written.
    let written = Value::Object(config.to_hugging_face("float32").unwrap());
    assert_eq!(written["rope_parameters"]["sliding_attention"], parameters["sliding_attention"]);
    assert_eq!(written["rope_parameters"]["full_attention"]["factor"], 2.0);
    for (key, value) in old.as_object().unwrap() {
        assert_eq!(&written[key], value, "{key}");
    }
}

/// Older files of Phi name LongRoPE otherwise, and the lengths that it divides are never guessed.
#[test]
fn longrope_has_three_names_and_an_original_length() {
    let read = |changes: Value| {
        let keys = json!({"model_type": "phi3", "architectures": null, "max_position_embeddings": 64, "head_dim": 4});
        let mut keys = with(&keys);
        keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        parse(&keys).map(|config| config.attentions().next().unwrap().rope.scaling.clone())
    };
    let table = |name: &str| json!({"type": name, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]});
    let mut found = Vec::new();
    for name in ["longrope", "su", "yarn"] {
        let scaling = json!({"rope_scaling": table(name), "original_max_position_embeddings": 16});
        found.push(read(scaling).unwrap());
        let refused = read(json!({"rope_scaling": table(name)})).unwrap_err().to_string();
        assert!(refused.contains("original_max_position_embeddings"), "{refused}");
    }
    let RopeScaling::Long { short, long, original_positions: 16, .. } = &found[0] else {
        panic!("{:?}", found[0])
    };
    assert_eq!((short.to_vec(), long.to_vec()), (vec![1.0, 1.5], vec![2.0, 3.0]));
    assert!(found[1..].iter().all(|scaling| *scaling == found[0]), "{found:?}");
}

#[test]
fn keys_of_structure_that_a_family_does_not_read_are_refused() {
    let named = |family: &str, class: &str| {
        let named = json!({"model_type": family, "architectures": [format!("{class}ForCausalLM")]});
        move |key: &str, value: Value| {
            let mut keys = with(&named);
            keys[key] = value;
            parse(&keys).map(drop).map_err(|error| error.to_string())
        }
    };
    let mixed = json!(["sliding_attention", "full_attention"]);
    let (full, sliding) = (json!(vec!["full_attention"; 2]), json!(vec!["sliding_attention"; 2]));
    for (family, class, takes_all_sliding) in [
        ("llama", "Llama", false),
        ("olmo2", "Olmo2", false),
        ("granite", "Granite", false),
        ("mistral", "Mistral", true),
        ("phi3", "Phi3", true),
    ] {
        let read = named(family, class);
        let refused = read("layer_types", mixed.clone()).unwrap_err();
        assert!(refused.contains("layer_types") && refused.contains("is not supported"), "{refused}");
        assert_eq!(read("layer_types", full.clone()), Ok(()));
        assert_eq!(read("layer_types", sliding.clone()).is_ok(), takes_all_sliding, "{family}");
    }
    let (llama, granite) = (named("llama", "Llama"), named("granite", "Granite"));
    for key in ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"] {
        assert!(llama(key, json!(2.0)).unwrap_err().contains(key));
        assert_eq!([llama(key, json!(1.0)), granite(key, json!(2.0))], [Ok(()), Ok(())]);
    }
    let smollm = named("smollm3", "SmolLM3");
    assert!(llama("no_rope_layers", json!([1, 0])).unwrap_err().contains("no_rope_layers"));
    assert_eq!(
        [llama("no_rope_layers", json!([1, 1])), smollm("no_rope_layers", json!([1, 0]))],
        [Ok(()), Ok(())]
    );
    for key in ["attention_sinks", "clip_qkv", "llama_4_scaling_beta"] {
        assert!(llama(key, json!(8.0)).unwrap_err().contains(key));
        assert_eq!([llama(key, json!(false)), llama(key, Value::Null)], [Ok(()), Ok(())]);
    }
    let (scores, logits) = ("attn_logit_softcapping", "final_logit_softcapping");
    let (gemma2, gemma3) = (named("gemma2", "Gemma2"), named("gemma3_text", "Gemma3"));
    let reads = [(&llama, scores), (&llama, logits), (&gemma3, scores), (&gemma3, logits), (&gemma2, scores)];
    let is_refused = reads.map(|(read, key)| {
        let names = |value: Value| read(key, value).is_err_and(|refusal| refusal.contains(key));
        (names(json!(50.0)), names(Value::Null))
    });
    assert_eq!(is_refused, [true, true, true, false, false].map(|of_number| (of_number, false)));
}

/// A message names the part that a family lacks, or says that only its description is missing.
#[test]
fn a_family_that_is_not_built_is_refused_with_what_it_lacks() {
    for (family, lacks) in [
        ("mixtral", "mixtures of experts are not built"),
        ("glm4", "rotary positions of neighbouring dimensions are not built"),
        ("apertus", "feed-forwards without a gate are not built"),
        ("gemma", "its parts are built, but its config.json has not been described"),
        ("invented", "supported: Qwen3"),
    ] {
        let refused = parse(&with(&json!({"model_type": family}))).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("{family:?} is not supported")) && refused.contains(lacks),
            "{refused}"
        );
    }
}

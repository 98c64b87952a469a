//! What the buttons and the search of charts do.

use super::session::Session;

/// A pinned chart stands in front and stays there; those that are pinned later follow, and can be moved.
fn pins(session: &mut Session) {
    let ids = "[...document.querySelectorAll('.charts')][0].querySelectorAll('figure.live')";
    let order = session.value(&format!(
        "(()=>{{const press=(id,text)=>[...document.querySelectorAll('#'+id+' .tools button')].find(b=>b.textContent===text).click();\
        const first=()=>[...{ids}].slice(0,2).map(f=>f.id).join(' ');\
        press('loss','pin');press('reward','pin');const pinned=first();press('reward','◀');const moved=first();\
        const kept=localStorage.getItem('stapo-charts');press('reward','pin');press('loss','pin');\
        return [pinned,moved,kept,localStorage.getItem('stapo-charts')]}})()"
    ));
    let expected = ["loss reward", "reward loss", "[\"reward\",\"loss\"]", "[]"];
    assert_eq!(order, serde_json::json!(expected));
}

/// A logarithmic axis has powers of ten, a large chart has the page's width, and a search leaves only what it names.
pub fn chart_tools(session: &mut Session) {
    pins(session);
    let shown = session.value(
        "(()=>{document.querySelectorAll('#accuracy .tools [title^=draws]').forEach(b=>b.click());\
        const ticks=[...document.querySelectorAll('#accuracy text[text-anchor=end]')].map(t=>Number(t.textContent));\
        const figure=document.getElementById('accuracy'),box=document.querySelector('input[placeholder=\"find charts\"]');\
        const isLarge=figure.offsetWidth>0.95*figure.parentElement.offsetWidth;\
        box.value='ACCURACY';box.dispatchEvent(new Event('input'));\
        const left=[...document.querySelectorAll('figure.live')].filter(f=>!f.hidden).map(f=>f.id);\
        const n=document.querySelectorAll('figure.live').length;return {n,steps:ticks.slice(1).map((v,i)=>Math.log10(v/ticks[i])),isLarge,left}})()",
    );
    let steps: Vec<f64> =
        shown["steps"].as_array().unwrap().iter().map(|step| step.as_f64().unwrap()).collect();
    let is_power = |step: &f64| *step > 0.5 && (step - step.round()).abs() < 1e-9;
    assert!(!steps.is_empty() && steps.iter().all(is_power), "{shown}");
    assert_eq!(shown["isLarge"], true, "{shown}");
    let left = shown["left"].as_array().unwrap();
    assert!(
        left.iter().any(|id| id == "accuracy") && (left.len() as u64) < shown["n"].as_u64().unwrap(),
        "{shown}"
    );
}

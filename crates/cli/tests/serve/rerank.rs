//! Documents that are scored.

use serde_json::{Value, json};

use crate::reranker::{self, DOCUMENTS, QUERY, SCORES, TOLERANCE};
use crate::server::{Server, kit};

#[test]
fn documents_are_ranked_as_llama_server_ranks_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reranker.gguf");
    reranker::write(&path);
    let server = Server::of(&path, &[]);
    let body = json!({ "query": QUERY, "documents": DOCUMENTS });
    for path in ["/v1/rerank", "/rerank", "/reranking", "/v1/reranking"] {
        let answer = server.post(path, &body).json();
        assert_eq!(answer["object"], "list");
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 36, "total_tokens": 36 }));
        let results = answer["results"].as_array().unwrap();
        let order: Vec<u64> = results.iter().map(|r| r["index"].as_u64().unwrap()).collect();
        assert_eq!(order, [0, 2, 1], "{answer}");
        for result in results {
            let index = result["index"].as_u64().unwrap() as usize;
            let score = result["relevance_score"].as_f64().unwrap();
            assert!((score - SCORES[index]).abs() < TOLERANCE, "{answer}");
        }
    }
    let top = |body: Value| server.post("/v1/rerank", &body).json()["results"].clone();
    let documents = [json!({ "text": DOCUMENTS[0] }), json!(DOCUMENTS[1])];
    let best = top(json!({
        "query": QUERY, "documents": documents, "top_n": 1, "return_documents": true,
    }));
    assert_eq!(best.as_array().unwrap().len(), 1);
    assert_eq!(best[0]["document"], json!({ "text": DOCUMENTS[0] }));
    for (body, field) in [
        (json!({ "documents": DOCUMENTS }), "query"),
        (json!({ "query": "a", "documents": [] }), "documents: expected 1 to 4096 texts"),
        (json!({ "query": "a", "documents": [1] }), "documents[0]"),
        (json!({ "query": "a", "documents": ["b"], "top_n": -1 }), "top_n"),
    ] {
        let refused = server.post("/v1/rerank", &body);
        assert!(refused.status == 400 && refused.body.contains(field), "{refused:?}");
    }
    let refused = server.post("/v1/embeddings", &json!({ "input": "a" }));
    assert!(refused.status == 400 && refused.body.contains("/v1/rerank"), "{refused:?}");
    let encoder = Server::of(&kit("bert.gguf"), &[]);
    let refused = encoder.post("/v1/rerank", &body);
    assert!(refused.status == 400 && refused.body.contains("expected a reranker"), "{refused:?}");
}

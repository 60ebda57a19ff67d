//! How well documents answer a query, as Jina's and Cohere's clients ask for it.

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::embeddings::{Embedded, compute};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float};

/// The most documents of a request.
const DOCUMENTS: usize = 4096;

/// The documents with their scores, the best first.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let query = fields.string("query")?.unwrap_or_default();
    if query.is_empty() {
        return Err(ApiError::field("query", "query: expected a text, found none"));
    }
    let documents = documents(&mut fields)?;
    let top_n = fields.count("top_n", 0)?.unwrap_or(documents.len());
    let returns_documents = fields.boolean("return_documents")?.unwrap_or(false);
    let (id, options) = (lease.id().to_owned(), lease.encoder()?.options().clone());
    let texts = documents.clone();
    let tokenize = move |encoder: &bodkin::Encoder| encoder.tokenize_pairs(&query, &texts);
    let Embedded { vectors, tokens } = compute(&app, caller, lease, options, tokenize).await?;
    // The first score of a model with several.
    let mut scores: Vec<(usize, f32)> = vectors.iter().map(|v| v[0]).enumerate().collect();
    scores.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let results = scores.into_iter().take(top_n).map(|(index, score)| {
        let mut result = json!({ "index": index, "relevance_score": float(score) });
        if returns_documents {
            result["document"] = json!({ "text": documents[index] });
        }
        result
    });
    Ok(Json(json!({
        "model": id,
        "object": "list",
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
        "results": results.collect::<Value>(),
    }))
    .into_response())
}

/// Texts, or objects with a `text`.
fn documents(fields: &mut Fields) -> Result<Vec<String>> {
    let documents = fields.array("documents")?.unwrap_or_default();
    if !(1..=DOCUMENTS).contains(&documents.len()) {
        let found = documents.len();
        let message = format!("documents: expected 1 to {DOCUMENTS} texts, found {found}");
        return Err(ApiError::field("documents", message));
    }
    let text = |(i, document): (usize, Value)| {
        let text = document.as_str().or_else(|| document["text"].as_str());
        text.map(str::to_owned).ok_or_else(|| {
            let message = format!("documents[{i}]: expected a text");
            ApiError::field("documents", message)
        })
    };
    documents.into_iter().enumerate().map(text).collect()
}

//! The files of the page, inside the binary.

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

pub(super) async fn asset(Path(name): Path<String>) -> Response {
    let (kind, text) = match name.as_str() {
        "app.css" => ("text/css; charset=utf-8", include_str!("app.css")),
        "app.js" => ("text/javascript; charset=utf-8", include_str!("app.js")),
        "icon.svg" => ("image/svg+xml", include_str!("icon.svg")),
        _ => return (StatusCode::NOT_FOUND, "no such file\n").into_response(),
    };
    // Checked again after a while: another version has other files under the same names.
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "private, max-age=60"),
    ];
    (headers, text).into_response()
}

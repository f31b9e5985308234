"""Requests to buckets are signed as the published examples of AWS Signature Version 4 for S3 are."""

from datetime import UTC, datetime

import httpx
import pytest

from phalanx_runtime.checkpoint.sources.s3 import AccessKey, SignatureV4

KEY = AccessKey("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT = datetime(2013, 5, 24, tzinfo=UTC)
NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of a body that is empty."""


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
    ids=["GET Bucket Lifecycle", "GET Bucket (List Objects)"],
)
def test_a_request_is_signed_as_the_published_example(query: str, signature: str) -> None:
    request = httpx.Request("GET", f"https://examplebucket.s3.amazonaws.com/?{query}")
    signed = next(SignatureV4(KEY, "us-east-1", now=lambda: AT).auth_flow(request))
    assert (signed.headers["x-amz-date"], signed.headers["x-amz-content-sha256"]) == ("20130524T000000Z", NOTHING)
    assert signed.headers["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"
    )

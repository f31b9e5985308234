"""Groups that send cached pages to groups of other services of the namespace (`spec.rebalancing.sharePages`)."""

import hashlib
import hmac

_PURPOSE = b"phalanx: cached pages"


def holder_token(service_token: str) -> str:
    """Returns the token of links on which a leader only sends cached pages, as hex digits.

    It follows from the service's token, which does not follow from it (HMAC-SHA-256, RFC 2104): groups need no other secret.
    """
    return hmac.digest(service_token.encode(), _PURPOSE, hashlib.sha256).hex()

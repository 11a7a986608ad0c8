// The hints of this page: web-sdk on its text box, with a token of the session's own, so that the server's key stays where it is.

import { attach } from "/upbeat.mjs";

/** Hints for `session` while somebody types in `selector`; what it returns has `detach`. */
export function hinting(api, selector, session) {
  const token = async (id) => (await api.json("/v1/client_secrets", { method: "POST", body: { session_id: id } })).value;
  return attach(selector, { session, token });
}

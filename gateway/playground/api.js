// Calls to this server. The key, if one is needed, is kept in sessionStorage until the tab closes.

const STORED = "upbeat-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** A successful response. Throws Refused with the server's message, or TypeError when there is no answer. */
export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers: sent, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let said = text;
  try {
    said = JSON.parse(text).error.message;
  } catch {
    // Not this server's envelope: a proxy's page, perhaps.
  }
  throw new Refused(response.status, said.slice(0, 300) || `status ${response.status}`);
}

export const json = async (path, options) => (await call(path, options)).json();

/** The data of a stream of server-sent events, each decoded; ends at [DONE] or with the stream. commented(text) is called for comments. */
export async function* events(response, commented = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        const lines = block.split("\n");
        for (const line of lines) if (line.startsWith(": ")) commented(line.slice(2));
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

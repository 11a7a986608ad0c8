/**
 * Tells an Upbeat gateway that somebody begins to type: "this session is about to speak", and never a byte of what is typed.
 *
 * Once somebody types (or composes, pastes, dictates) where one watches, a hint leaves at once, then at most one in 4 s while typing goes on;
 * each counts for 6 s. Closing the page, leaving the route, switching to another session, or detaching withdraws a hint that still counts.
 * Whatever fails, the page never hears of it: no exception, no rejection. A gateway that fails or says 429 is asked less and less often.
 */

/** What to watch: a CSS selector (of the field, or of anything around it), an element, or a function that says one of these. */
export type Target = string | Element | (() => string | Element | null | undefined);

export interface Options {
  /** The session id that the chat's requests carry, or a function that says the current one; nothing is sent while there is none. */
  session: string | null | undefined | (() => string | null | undefined);
  /** A browser token (`POST /v1/client_secrets`), or a function that fetches one for a session: asked when the field gets the focus or
   * the first key, and again whenever the gateway refuses what it gave last. */
  token?: string | ((session: string) => string | Promise<string>);
  /** The gateway, such as `https://llm.example.com`. Default: where the script tag's file came from; for the module, the page's own origin. */
  url?: string;
  /** Focus counts as typing. */
  focus?: boolean;
  /** The model that will be asked, where it is not the session's last one. */
  model?: string;
}

export interface Handle {
  /** Hint now, as a key would: for a voice button, say. */
  advise: () => void;
  /** The module's `bind`. */
  bind: typeof bind;
  /** Withdraw the hint and stop watching. */
  detach: () => void;
}

const realIds = new Map<string, string>();

/** A new chat that was announced under a provisional id has got its real one. */
export const bind = (provisionalId: string, realId: string): void => void realIds.set(provisionalId, realId);

/** Watch `target`. The listeners are the window's: the field may come later, and be rendered again and again. */
export const attach = (target: Target, { session, token, url = "", focus, model } = {} as Options): Handle => {
  const now = () => performance.now();
  /** Whose hint went last, and until when it counts. */
  let last: string | undefined;
  let counts = 0;
  /** No hint before this, and how many failed in a row. */
  let next = 0;
  let failed = 0;
  /** What the gateway is shown, and for which session. */
  let credential: Promise<string | undefined> | undefined;
  let credentialOf: string | undefined;

  const quietly =
    <A extends unknown[]>(act: (...args: A) => unknown) =>
    async (...args: A) => {
      try {
        await act(...args);
      } catch {}
    };

  const present = (id: string) => {
    if (id != credentialOf || !credential) {
      credentialOf = id;
      const asked = (credential = (async () => (typeof token == "function" ? await token(id) : token))());
      (async () => {
        try {
          await asked;
        } catch {
          credential = undefined;
        }
      })();
    }
    return credential;
  };

  const send: (id: string, withdraw?: boolean, again?: boolean) => Promise<void> = quietly(async (id, withdraw, again) => {
    const shown = present(id);
    const address = url + (withdraw ? "/v1/invalidate" : "/v1/advisory");
    let pause = 0;
    try {
      const body = JSON.stringify({ session_id: id, token: await shown, ...(withdraw ? {} : { ttl_s: 6, model_id: model }) });
      let answer;
      try {
        // Without keepalive, a request ends with the page.
        if (!withdraw || "keepalive" in Request.prototype)
          // Text goes as text/plain: no preflight. No referrer: the page's address may hold a draft. No prototype: pages may add to it.
          answer = fetch(address, {
            __proto__: null,
            method: "POST",
            body,
            keepalive: true,
            credentials: "omit",
            referrerPolicy: "no-referrer",
          } as RequestInit);
      } catch {}
      // Whatever becomes of a request that the page does not outlive: it has been sent, and is not sent twice.
      if (withdraw) return answer || navigator.sendBeacon(address, body);
      const { ok, status, headers } = (await answer)!;
      if (ok) return (failed = 0);
      if (status == 401 && typeof token == "function") {
        if (shown == credential) credential = undefined;
        if (!again && counts) return send(id, false, true);
      }
      pause = +headers.get("retry-after")! * 1e3 || 0;
    } catch {
      if (withdraw) return;
    }
    counts = 0;
    next = now() + Math.max(pause, Math.min(4e3 * 2 ** ++failed, 3e5));
  });

  const leave = () => {
    if (now() < counts) send(last!, true);
    counts = 0;
  };

  const turn = (hint: boolean) => {
    const said = typeof session == "function" ? session() : session;
    const id = said && (realIds.get(said) || said);
    const other = id != last;
    if (other) leave();
    if (!id) return;
    if (!hint) return present(id);
    const t = now();
    if (t < next && (!other || failed)) return;
    last = id;
    next = t + 4e3;
    counts = t + 6e3;
    send(id);
  };

  let stop: AbortController;
  const on = (from: EventTarget | undefined, types: string, act: (event: any) => unknown) =>
    types.split(" ").map((type) => from?.addEventListener(type, quietly(act), { capture: true, passive: true, signal: stop.signal }));

  const detach = quietly(() => {
    leave();
    stop.abort();
  });

  quietly(() => {
    stop = new AbortController();
    on(window, "beforeinput input compositionstart paste focusin", (event) => {
      const watched = typeof target == "function" ? target() : target;
      if (watched && event.composedPath().some((node: any) => node == watched || (typeof watched == "string" && node.matches?.(watched))))
        return turn(focus || event.type != "focusin");
    });
    on(window, "pagehide popstate", leave);
    on((window as any).navigation, "currententrychange", (event) => event.navigationType == "push" && leave());
    on(window, "online", () => failed && (failed = next = 0));
  })();

  return { advise: quietly(() => turn(true)), bind, detach };
};

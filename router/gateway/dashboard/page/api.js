// What the gateway is asked, with the key of this tab.

const BASE = new URL("api/", import.meta.url);
const KEY = "headwater-key";
const LIMIT_MS = 8000;

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function ask(path, query = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const given = key.get();
  const headers = given ? { authorization: `Bearer ${given}` } : {};
  let answer;
  try {
    answer = await fetch(url, { headers, cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  } catch {
    throw new Failure(0, "the gateway does not answer");
  }
  const body = await answer.json().catch(() => {
    if (answer.ok) throw new Failure(0, "the answer broke off");
    return {};
  });
  if (!answer.ok) throw new Failure(answer.status, body.error?.message ?? `status ${answer.status}`);
  return body;
}

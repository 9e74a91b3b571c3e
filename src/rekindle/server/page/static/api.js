// Calls of the server, with the operator's key where one is needed, and its stream of events.

const OWN = "/v1/rekindle";
let key = null;
try { key = sessionStorage.getItem("key"); } catch { /* storage may be forbidden */ }

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export function setKey(given) {
  key = given;
  try { sessionStorage.setItem("key", given); } catch { /* it lasts until the page is left */ }
}

export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, problem.error?.message ?? `The server answered with status ${answer.status}.`);
  }
  return answer;
}

export const own = async (path, options) => (await request(OWN + path, options)).json();

// The items of a server-sent stream: EventSource cannot send a key.
export async function* events(path, options) {
  const reader = (await request(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const live = signal => events(`${OWN}/live`, { signal });

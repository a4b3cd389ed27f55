// A Worker in a hidden frame, for pages opened from file://, where browsers refuse real workers.
// The theme's search talks to it by postMessage and onmessage alone.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.tell(data);
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve());
      this.load(inside, url).then(() => {
        this.inside = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    load(inside, url) {
      return new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = loaded;
        script.onerror = failed;
        inside.document.body.append(script);
      });
    }

    tell(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    }

    postMessage(data) {
      if (!this.inside) this.waiting.push(data);
      else this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {}
  };
}

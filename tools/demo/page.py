"""The page: a form, the sample in the making, and everything made so far. What it does is in `studio.py`."""

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from opensora.utils.errors import UserError
from tools.demo.studio import Cancelled, Studio, Update, Wish, all_settings, caption, wish_of

if TYPE_CHECKING:
    import gradio as gr

TITLE = "opensora demo"
LARGEST_SIDE, LONGEST, MOST_STEPS, MOST_GUIDANCE = 1024, 256, 250, 20.0
WAITING = 16  # wishes in the queue; more are told to come back


def build_page(studio: Studio) -> "gr.Blocks":
    """The page of a studio; `launch()` serves it."""
    import gradio as gr

    first = studio.first_wish()
    with gr.Blocks(title=TITLE) as page:
        gr.Markdown(_head(studio))
        with gr.Row():
            with gr.Column(scale=2):
                form = _form(first)
                with gr.Row():
                    make = gr.Button("Generate", variant="primary", elem_id="generate")
                    cancel = gr.Button("Cancel", variant="stop", elem_id="cancel")
            with gr.Column(scale=3):
                status = gr.HTML(_status("Ready."), elem_id="status")
                preview = gr.Image(
                    label="Preview while it is made", interactive=False, height=190, buttons=[], elem_id="preview"
                )
                video = gr.Video(label="Sample", autoplay=True, loop=True, interactive=False, elem_id="sample")
                picture = gr.Image(label="Sample", visible=False, interactive=False, elem_id="picture")
        gr.Markdown("### Made so far\nClick one to see its settings.")
        gallery = gr.Gallery(
            value=_gallery(studio),
            columns=4,
            fit_columns=False,
            height=240,
            object_fit="contain",
            show_label=False,
            elem_id="gallery",
        )
        with gr.Accordion("Settings of the chosen sample", open=False):
            again = gr.Button("Put these settings into the form")
            settings = gr.Code(language="json", interactive=False, elem_id="settings")
        chosen = gr.State(None)

        shown = [status, preview, video, picture, gallery]
        run = make.click(_generate(studio), form, shown, concurrency_limit=1)
        cancel.click(_cancel(studio), None, [status], cancels=[run], queue=False)
        gallery.select(_choose(studio), None, [chosen, settings])
        again.click(_again, [chosen], form)
        page.load(lambda: _gallery(studio), None, [gallery])  # what was made since the page was built
    page.queue(max_size=WAITING)
    return page


def _form(first: Wish) -> list[Any]:
    """The inputs, in the order of `Wish`."""
    import gradio as gr

    prompt = gr.Textbox(first.prompt, label="Prompt", lines=3, placeholder="a white dog on the floor", elem_id="prompt")
    negative = gr.Textbox(label="Negative prompt", info="what to steer away from; needs a guidance other than 1")
    image = gr.Image(label="First frame (optional)", type="filepath", height=160, elem_id="image")
    with gr.Row():
        height = gr.Slider(16, LARGEST_SIDE, first.height, step=16, label="Height")
        width = gr.Slider(16, LARGEST_SIDE, first.width, step=16, label="Width")
    with gr.Row():
        num_frames = gr.Slider(1, LONGEST, first.num_frames, step=1, label="Frames", info="1 makes a picture")
        steps = gr.Slider(1, MOST_STEPS, first.steps, step=1, label="Steps", elem_id="steps")
    with gr.Row():
        guidance = gr.Slider(0, MOST_GUIDANCE, first.guidance, step=0.1, label="Guidance", info="1 switches it off")
        seed = gr.Number(first.seed, precision=0, label="Seed", info="empty: another one each time")
    return [prompt, negative, image, height, width, num_frames, steps, guidance, seed]


def _generate(studio: Studio) -> Any:
    """The handler of the button: yields values of status, preview, video, picture and gallery."""
    import gradio as gr

    def generate(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield _status("Waiting for the one before."), None, None, gr.skip(), gr.skip()
        try:
            for update in studio.make(Wish(*values), owner=str(request.session_hash)):
                yield _shown(studio, update)
        except Cancelled:
            yield _status("Cancelled."), None, None, gr.skip(), gr.skip()
        except UserError as error:
            yield _status(str(error), bad=True), None, None, gr.skip(), gr.skip()

    return generate


def _shown(studio: Studio, update: Update) -> tuple[Any, ...]:
    """What the outputs become: nothing new where nothing changed."""
    import gradio as gr

    if update.sample is None:
        rest = (update.num_steps - update.step) * update.seconds / update.step
        text = f"Step {update.step} of {update.num_steps}, {rest:.0f} s left."
        preview = gr.skip() if update.preview is None else update.preview
        return _status(text, update.step / update.num_steps), preview, gr.skip(), gr.skip(), gr.skip()
    path = str(update.sample.path)
    still = update.sample.path.suffix == ".png"
    video = gr.update(value=None if still else path, visible=not still)
    picture = gr.update(value=path if still else None, visible=still)
    text = f"Done in {update.seconds:.1f} s: {update.sample.path.name}"
    return _status(text, 1.0), gr.skip(), video, picture, _gallery(studio)


def _cancel(studio: Studio) -> Any:
    import gradio as gr

    def cancel(request: gr.Request) -> str:
        studio.cancel(str(request.session_hash))
        return _status("Cancelled.")

    return cancel


def _choose(studio: Studio) -> Any:
    import gradio as gr

    def choose(event: gr.SelectData) -> tuple[dict[str, Any] | None, str]:
        caption_of_event = event.value["caption"]
        for sample in studio.samples():
            if caption(sample) == caption_of_event:
                return sample.record, all_settings(sample.record)
        return None, "This sample is no longer in the folder."

    return choose


def _again(record: dict[str, Any] | None) -> list[Any]:
    """The form of a chosen sample."""
    import gradio as gr

    return [gr.skip()] * len(Wish._fields) if record is None else list(wish_of(record))


def _gallery(studio: Studio) -> list[tuple[str, str]]:
    return [(str(sample.path), caption(sample)) for sample in studio.samples()]


def _head(studio: Studio) -> str:
    model, weights = studio.cfg.model["type"], studio.cfg.model.get("from_pretrained")
    return f"# {TITLE}\n`{model}` with the weights of `{weights}` on `{studio.pipeline.device}`."


def _status(text: str, done: float | None = None, *, bad: bool = False) -> str:
    """A line with a bar, or a message about what went wrong."""
    bar = "" if done is None else f'<progress value="{done:.4f}" max="1" style="width: 100%"></progress>'
    style = "color: #b00020; font-weight: 600" if bad else ""
    return f'<div role="status" style="{style}">{html.escape(text)}</div>{bar}'
